"""A rehearsal: the engine's own code runs as one rank, on a GPU that is not there."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_cuda.collectives import Collectives, World
from fake_cuda.device import GPU_BYTES, PER_MACHINE, fake_gpu
from fake_cuda.log import Log
from fake_cuda.storages import Storages
from fake_cuda.streams import InlineExecutor, Queues
from fake_cuda.tensors import DeviceFunctions, LoggedTensors, moved, of_memory
from fake_cuda.values import value_of
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.launch import rank as launch_rank
from opensora_cli.memory import host_weights

_go_back = torch.autograd._engine_run_backward
_PROPAGATE = "_propagate_tensor_meta_non_cached"


@dataclass(frozen=True, slots=True)
class Rehearsal:
    world: World
    rank: int
    log: Log
    queues: Queues
    mode: LoggedTensors

    @property
    def device(self) -> torch.device:
        return self.queues.device

    @property
    def context(self) -> RankContext:
        return RankContext(
            rank=self.rank,
            local_rank=self.rank % PER_MACHINE,
            world_size=self.world.size,
            nnodes=-(-self.world.size // PER_MACHINE),
            master_addr="fake",
            master_port=1,
        )


@contextmanager
def rehearsal(world: World | None = None, rank: int = 0, *, memory_bytes: int = GPU_BYTES) -> Iterator[Rehearsal]:
    """Be one rank of a world inside the block: CUDA is there, and nothing has memory.

    `init_with_retry`, with which ranks join, makes a process group that sends nothing.
    """
    world = world or World()
    # Of results on `cuda` it remembers which GPU that was.
    FakeTensorMode.cache_clear()
    log = Log(rank)
    device = torch.device("cuda", rank % PER_MACHINE)
    storages, queues = Storages(log), Queues(log, device)
    collectives = Collectives(world, log, storages, queues)
    mode = LoggedTensors(log, storages, queues, collectives, memory_bytes)
    patched = (
        (torch.autograd, "_engine_run_backward", _backwards),
        (torch.UntypedStorage, "resize_", _followed(storages, queues)),
        (FakeTensor, "record_stream", lambda tensor, stream: storages.lend(tensor, stream.queue)),
        (FakeTensor, "data_ptr", storages.address),
        (FakeTensor, "numpy", _numpy),
        (FakeTensor, "set_", of_memory),
        (nn.Module, "to", moved),
        (fake_tensor, "init_gpu_context", lambda device: None),
        (dist, "batch_isend_irecv", collectives.together),
        # Messages of the host go by gloo, tensors of the device by NCCL.
        (dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl"),
        # It would make the whole of what is divided, to find out what a result is like.
        (ShardingPropagator, _PROPAGATE, mode.unlogged(getattr(ShardingPropagator, _PROPAGATE))),
        (launch_rank, "init_with_retry", _join),
        (host_weights, "ThreadPoolExecutor", partial(InlineExecutor, queues)),
    )
    with ExitStack() as stack:
        for owner, name, stand_in in patched:
            # A function that is to be a method, too.
            value = _method(stand_in) if owner in (FakeTensor, nn.Module, ShardingPropagator) else stand_in
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(mock.patch("socket.gethostname", return_value=world.machine(rank)))
        stack.enter_context(fake_gpu(memory_bytes, log, storages, queues))
        stack.callback(_leave)
        stack.callback(storages.end)
        torch.cuda.set_device(device)
        stack.enter_context(mode)
        stack.enter_context(DeviceFunctions())
        yield Rehearsal(world, rank, log, queues, mode)


def _backwards(*arguments: Any, **options: Any) -> Any:
    # torch leaves the mode before it goes back, where blocks are computed again.
    with DeviceFunctions():
        return _go_back(*arguments, **options)


def _followed(storages: Storages, queues: Queues) -> Any:
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        storages.resized(storage, queue=queues.current.queue)
        return result

    return resize_


def _method(function: Any) -> Any:
    return lambda tensor, *arguments, **options: function(tensor, *arguments, **options)


def _numpy(tensor: Tensor, *, force: bool = False) -> Any:
    if tensor.device.type != "cpu":
        raise TypeError(f"can't convert {tensor.device} device type tensor to numpy")
    value = value_of(tensor)
    with _disable_current_modes():
        # Pixels and weights, which nobody knows, are zeros.
        return (torch.zeros(tensor.shape, dtype=tensor.dtype) if value is None else value).numpy()


def _join(device_type: str, context: RankContext, **_: object) -> None:
    # Not at the top: it registers a backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=context.rank, world_size=context.world_size)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
