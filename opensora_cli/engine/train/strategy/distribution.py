"""How the ranks of a training run share its work: the interface, one process alone, and whole copies (DDP)."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.mesh import ParallelMesh
from opensora_cli.parallel.scheduling import BandwidthMonitor


class Distribution:
    """The ranks of a training run and what each of them holds; this class itself is one process alone.

    A micro-batch is computed by one data-parallel rank: a process, or several that share its tokens or its features
    and are given the same one. Gradients are averaged over data-parallel ranks, so a loss has to be a mean over what
    its rank computes. Where there are several processes, all of them have to call every method, in the same order.
    """

    divides = False
    """Whether `shard` leaves a rank a part of the weights; such a transformer may come on the meta device."""

    def __init__(self, device: torch.device, mesh: ParallelMesh | None = None) -> None:
        self.device = device
        self.mesh = mesh
        self.monitor = BandwidthMonitor()
        """Of the exchanges of tokens for heads."""
        self.rank = dist.get_rank() if mesh else 0
        self.ranks = mesh.shape.size if mesh else 1
        self.data_ranks = mesh.shape.replicate * mesh.shape.shard if mesh else 1
        """How many micro-batches are computed at a time."""
        self.data_rank = mesh.coordinate("replicate") * mesh.shape.shard + mesh.coordinate("shard") if mesh else 0
        """Which of them this process has a part in."""

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that talks and writes for all."""
        return self.rank == 0

    def shard(self, module: nn.Module) -> Callable[..., Tensor]:
        """Leave this rank its part of a module, in place and on its device, and return what is called instead of it.

        Frozen weights stay where they are: they may wait in the host's memory.
        """
        return _moved(module, self.device)

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Wrap forward and backward of one micro-batch.

        After the block of the last one of an update, gradients are the sum over this rank's micro-batches, averaged
        over the data-parallel ranks.
        """
        yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Wrap forward passes to which no backward pass belongs: what they have gathered is let go after the block."""
        yield

    @torch.no_grad()
    def clip_grad_norm(self, module: nn.Module, max_norm: float) -> Tensor:
        """Scale down gradients whose norm is over `max_norm`, as `nn.utils.clip_grad_norm_` does in one process.

        Return the norm of the whole gradient before that, the same on all ranks, in fp32. It is not finite if a
        gradient is not finite on any rank; the gradients are then invalid.
        """
        gradients = {
            name: local(parameter.grad) for name, parameter in module.named_parameters() if parameter.grad is not None
        }
        counted = [gradient for name, gradient in gradients.items() if self._counts(name)]
        # In fp64: squares of what fp32 can hold overflow it.
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        if counted:
            squares += torch.stack(torch._foreach_norm(counted)).double().square().sum()
        norm = self._summed_over_parts(squares).sqrt().float()
        if gradients:
            torch._foreach_mul_(list(gradients.values()), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the means over the data-parallel ranks; the names have to be the same on all ranks."""
        if self.mesh is None:
            return dict(values)
        names = sorted(values)
        sums = torch.tensor([values[name] for name in names], dtype=torch.float64)
        dist.all_reduce(sums, group=self.mesh.group("replicate", "shard"))
        return dict(zip(names, (sums / self.data_ranks).tolist(), strict=True))

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        if self.mesh is None:
            return flag
        flags = torch.tensor(flag, dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.any(False)

    def whole_name(self, name: str) -> str:
        """Return what a parameter of the sharded module is called in the whole one."""
        return name

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole of which every rank gives its part: the same on all, bit for bit; without gradients.

        The part is of the parameter `name` of the sharded module, or of anything that is divided as it is: a moment, an
        average; on any device, of any dtype, a plain tensor or a DTensor. What has another name is whole already. The
        result may share memory with `tensor`.
        """
        return tensor.detach()

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return a copy of this rank's part of a whole tensor, as a plain tensor on its device: undoes `whole`."""
        return whole.detach().clone()

    def _counts(self, name: str) -> bool:
        """Whether this rank's part of a gradient adds to the sum over the ranks: one of several that have the same."""
        return True

    def _summed_over_parts(self, squares: Tensor) -> Tensor:
        return squares


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a plain one that shares its memory; a plain one is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ReplicatedDistribution(Distribution):
    """The whole model on every rank. Gradients are summed once an update, while backward is still computing others."""

    def __init__(self, device: torch.device, mesh: ParallelMesh) -> None:
        super().__init__(device, mesh)
        self._group = mesh.group("replicate")
        self._wrapped: list[DistributedDataParallel] = []

    def shard(self, module: nn.Module) -> Callable[..., Tensor]:
        """Average the gradients of a module from now on, where it is called by what this returns.

        Every trained weight has to be used in every such call.
        """
        # These are 1x1x1 kernels, whose strides along single taps mean nothing: autograd lays out all others alike.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        # Frozen weights are the same on all ranks, and may be mapped from their file, where nothing is to be written.
        frozen = [name for name, weight in module.named_parameters() if not weight.requires_grad]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, frozen)  # type: ignore[no-untyped-call]
        wrapped = DistributedDataParallel(
            _moved(module, self.device),
            process_group=self._group,
            gradient_as_bucket_view=True,
            find_unused_parameters=_may_leave_weights_out(module),
        )
        self._wrapped.append(wrapped)
        return wrapped

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Let gradients be summed in the backward pass of the last micro-batch alone."""
        with ExitStack() as stack:
            if not last:
                for wrapped in self._wrapped:
                    stack.enter_context(wrapped.no_sync())
            yield


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Move what is trained, and buffers."""
    trained = (weight for weight in module.parameters() if weight.requires_grad)
    for tensor in (*trained, *module.buffers()):
        tensor.data = tensor.data.to(device)
    return module


def _may_leave_weights_out(module: nn.Module) -> bool:
    # Without single-stream blocks nothing uses the text output of the last double-stream block.
    return isinstance(module, MMDiT) and module.config.depth_single_blocks == 0
