"""Simulated rank of a training run: it sends nothing, and holds the same tensors as a real rank."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.train.distribution import Distribution, distribution_of
from opensora_cli.memory.counting import DispatchMode, TensorBytes
from opensora_cli.parallel.mesh import use_mesh
from opensora_cli.settings.train import TrainSettings

GRADIENTS, BUFFERS = "gradients", "buffers"


@contextmanager
def fake_rank(settings: TrainSettings, rank: int) -> Iterator[Distribution]:
    """Simulate this rank of a run inside the block: collectives return at once, and do not fill their outputs.

    Enter this context before `fake_device`, inside which `Distribution.shard` is called. Raises RuntimeError
    in a process that already is a rank, and HardwareError if torch is too old.
    """
    device, ranks = torch.device("cpu"), settings.parallel.world_size
    if ranks == 1:
        yield Distribution(device)
        return
    if dist.is_initialized():
        raise RuntimeError("the memory of ranks is estimated in a process that is none of them")
    if settings.strategy.shards and torch.__version__ < "2.11":
        raise HardwareError(
            f"the memory of ranks that share weights is not estimated with torch {torch.__version__}, which has no "
            "collectives for fake tensors",
            hint="use torch 2.11 or later",
        )
    # Imported here because the import registers a backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield distribution_of(settings, device=device, kind=FakeDistribution)
    finally:
        use_mesh(None)
        dist.destroy_process_group()


class FakeDistribution(Distribution):
    """Distribution of one rank whose collectives do not fill their outputs.

    FSDP2's own code runs because it needs no results of its collectives. The reducer of DistributedDataParallel does
    not support fake tensors: separate tensors, allocated at the start, represent its buckets.
    """

    _is_last = True

    @cached_property
    def buckets(self) -> dict[nn.Parameter, Tensor]:
        """Mapping from a weight to its piece of a bucket."""
        return {}

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        return dict(values)

    def any(self, flag: bool) -> bool:
        return flag

    def replicate(self, module: nn.Module, trained: Collection[nn.Parameter]) -> nn.Module:
        for weight in trained:
            self.buckets[weight] = torch.empty_like(weight, requires_grad=False)
            weight.register_post_accumulate_grad_hook(self._move)  # type: ignore[no-untyped-call]
        return module

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        self._is_last = last
        with super().accumulating(last=last):
            yield

    def _move(self, weight: nn.Parameter) -> None:
        """Copy a gradient of an update's last micro-batch into its bucket, unless it is already there."""
        if self._is_last and weight.grad is not None and weight.grad is not self.buckets[weight]:
            weight.grad = self.buckets[weight].copy_(weight.grad)


class ExchangeOwners(DispatchMode):
    """Dispatch mode that assigns FSDP2's communication buffers to owners of a counter. Enter it inside the counter."""

    def __init__(self, counter: TensorBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and assign owners to the communication buffers of FSDP2."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "fsdp":
            match func._opname:
                case "all_gather_copy_in":
                    self._counter.add(result[1], BUFFERS)
                case "split_with_sizes_copy":
                    self._counter.add(kwargs["out"], BUFFERS)
                case "chunk_cat":
                    self._counter.add(args[0], GRADIENTS)
                    self._counter.add(kwargs["out"], BUFFERS)
        return result
