"""Ranks of a training run, and their shares of work and weights."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from opensora_cli.core.device import torch_dtype
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.components.hardware import pick_hardware
from opensora_cli.engine.components.parallelize import plan_exchange
from opensora_cli.engine.launch.rank import agreed, device_type, joined, settings_of_ranks
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.collectives import Exchange, all_gather
from opensora_cli.parallel.mesh import ParallelMesh, use_mesh
from opensora_cli.parallel.sequence import open_exchange
from opensora_cli.parallel.shares import ExchangePlan, MeshShape, span
from opensora_cli.parallel.tensor import FeatureCut
from opensora_cli.settings.devices import Strategy, TrainParallelSettings
from opensora_cli.settings.train import TrainSettings

WEIGHT_AXES = ("shard", "ring", "ulysses")
"""Axes that divide rows of weights between their ranks. Gradients of ranks that share tokens are also summed."""


class WeightLayout(NamedTuple):
    """Division of one weight between ranks."""

    whole_name: str
    """Name of the weight in the model of a single process."""
    rows: int
    """Number of rows on all ranks that divide them."""
    cut: FeatureCut | None
    """Division of the features between tensor-parallel ranks. None means that all ranks have all features."""


class Distribution:
    """Distribution of a training run over its ranks. Without a mesh, one process trains alone.

    One data-parallel rank computes a micro-batch. It is a process, or several processes that get the same micro-batch
    and share its tokens or features. Gradients are averaged over data-parallel ranks, so that a loss must be a mean
    over the samples of its rank. All processes must call every method, in the same order.

    Args:
        dtype: dtype of gathered weights and compute; gradients are summed in fp32. None means that of the weights.
        exchange: plan for exchanging tokens for heads between ranks that share tokens.
        offload_states: keep sharded weights, gradients and moments in host memory.
    """

    def __init__(
        self,
        device: torch.device,
        mesh: ParallelMesh | None = None,
        *,
        strategy: Strategy = Strategy.DDP,
        dtype: torch.dtype | None = None,
        exchange: ExchangePlan | None = None,
        offload_states: bool = False,
    ) -> None:
        self.device, self.mesh, self.strategy, self.dtype = device, mesh, strategy, dtype
        self.exchange, self.offload_states = exchange or ExchangePlan(), offload_states
        self.rank = dist.get_rank() if mesh else 0
        self.ranks = mesh.shape.size if mesh else 1
        self.data_ranks = mesh.shape.replicate * mesh.shape.shard if mesh else 1
        """Number of micro-batches that are computed at the same time."""
        self.data_rank = mesh.coordinate("replicate") * mesh.shape.shard + mesh.coordinate("shard") if mesh else 0
        """Index of the micro-batch, among these, that this process computes."""
        self.divides = mesh is not None and strategy.shards
        """Whether the ranks divide the weights of the transformer, which may then be on the meta device."""
        self.groups: Sequence[FSDPModule] = ()
        """Modules whose weights are gathered at once."""
        self.layouts: Mapping[str, WeightLayout] = {}
        """Layout of each parameter, by its name in the sharded module."""
        self.norms: Sequence[nn.Parameter] = ()
        """Weights whose gradients on a tensor-parallel rank come from its own heads only."""
        self._replicated: list[DistributedDataParallel] = []
        self.token_exchange: Exchange | None = None
        self.fsdp: DeviceMesh | None = None
        """Mesh of FSDP2, in which all axes that divide rows form one axis."""
        if mesh is not None and self.divides:
            # All ranks must create their groups at the same time, outside of fake tensors.
            self.fsdp = _fsdp_mesh(mesh, device.type)
            self._parts = mesh.group(*WEIGHT_AXES, "tensor")
            self.token_exchange = open_exchange(mesh, self.exchange)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def replicate(self, module: nn.Module, trained: Collection[nn.Parameter]) -> Callable[..., Tensor]:
        """Wrap a whole copy of a module so that backward passes average the gradients of `trained` (DDP)."""
        # FSDP2 with shards of size 1 holds a second copy of the weights, and rejects the channels-last format.
        assert self.mesh is not None
        # The warning is about 1x1x1 kernels, whose strides along single taps have no meaning.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        # Frozen weights are the same on all ranks, and may be mapped from a file that must not be written to.
        own = {id(weight) for weight in trained}
        others = [name for name, weight in module.named_parameters() if id(weight) not in own]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, others)  # type: ignore[no-untyped-call]
        replicated = DistributedDataParallel(
            moved(module, self.device),
            process_group=self.mesh.group("replicate"),
            gradient_as_bucket_view=True,
            # Without single-stream blocks, the text output of the last double-stream block is unused.
            find_unused_parameters=isinstance(module, MMDiT) and module.config.depth_single_blocks == 0,
        )
        self._replicated.append(replicated)
        return replicated

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Wrap forward and backward of one micro-batch.

        After the last micro-batch of an update, gradients are the sum over this rank's micro-batches, averaged over
        the data-parallel ranks.
        """
        with ExitStack() as stack:
            if not last:
                for replicated in self._replicated:
                    stack.enter_context(replicated.no_sync())
            for group in self.groups:
                # Reduce-scatter gradients, and keep gathered weights, according to the strategy.
                group.set_requires_gradient_sync(last or not self.strategy.reduces_once, recurse=False)
                group.set_reshard_after_backward(last or self.strategy.gathers_twice, recurse=False)
            yield
        gradients = [local(norm.grad) for norm in self.norms if norm.grad is not None]
        if last and gradients and self.mesh is not None:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self.mesh.group("tensor"))
            for gradient, summed in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Wrap forward passes without backward. Gathered weights are freed at the end: updates miss them."""
        try:
            yield
        finally:
            for group in self.groups:
                group.reshard()

    @torch.no_grad()
    def clip_grad_norm(self, weights: Mapping[str, nn.Parameter], max_norm: float) -> Tensor:
        """Scale down gradients whose norm exceeds `max_norm`, as `nn.utils.clip_grad_norm_` does in one process.

        Return the norm of the whole gradient before clipping, the same on all ranks, in fp32. If it is not finite, the
        gradients are invalid.
        """
        gradients = {name: local(parameter.grad) for name, parameter in weights.items() if parameter.grad is not None}
        # Of equal parts on tensor-parallel ranks, only one counts.
        is_first = self.mesh is None or not self.divides or self.mesh.group("tensor").rank() == 0
        counted = [gradient for name, gradient in gradients.items() if is_first or self.layouts[name].cut is not None]
        # Sum in fp64 because squares of fp32 values overflow fp32.
        device = torch.device("cpu") if self.offload_states else self.device
        squares = torch.zeros((), dtype=torch.float64, device=device)
        if counted:
            squares += torch.stack(torch._foreach_norm(counted)).double().square().sum()
        if self.divides:
            dist.all_reduce(squares, group=self._parts)
        norm = squares.sqrt().float()
        if gradients:
            torch._foreach_mul_(list(gradients.values()), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the means over the data-parallel ranks; the names must be the same on all ranks."""
        if self.mesh is None:
            return dict(values)
        names = sorted(values)
        sums = torch.tensor([values[name] for name in names], dtype=torch.float64)
        dist.all_reduce(sums, group=self.mesh.group("replicate", "shard"))
        return dict(zip(names, (sums / self.data_ranks).tolist(), strict=True))

    def any(self, flag: bool) -> bool:
        if self.mesh is None:
            return flag
        flags = torch.tensor(flag, dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    def barrier(self) -> None:
        self.any(False)

    def whole_name(self, name: str) -> str:
        return self.layouts[name].whole_name if name in self.layouts else name

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole tensor from the parts of all ranks, bitwise identical on all ranks.

        The part belongs to the parameter `name` of the sharded module, or to a moment or average of it.
        A tensor with another name is already whole. The result may share memory with `tensor`.
        """
        own = local(tensor.detach())
        if self.mesh is None or name not in self.layouts:
            return own
        layout, rows = self.layouts[name], self.mesh.group(*WEIGHT_AXES)
        share = all_gather(own, rows, dim=0, sizes=row_sizes(layout.rows, rows.size()))
        if layout.cut is None:
            return share
        cut = layout.cut
        shares = all_gather(share, self.mesh.group("tensor"), dim=cut.dim, sizes=cut.sizes)
        return cut.join(torch.split(shares, list(cut.sizes), cut.dim))

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return a copy of this rank's part of a whole tensor, as a plain tensor on its device; inverse of `whole`."""
        if self.mesh is None or name not in self.layouts:
            return whole.detach().clone()
        cut, rows = self.layouts[name].cut, self.mesh.group(*WEIGHT_AXES)
        share = whole.detach() if cut is None else cut.cut(whole, self.mesh.group("tensor").rank())
        own = span(row_sizes(share.shape[0], rows.size()), rows.rank())
        return share[own].clone(memory_format=torch.contiguous_format)


def _fsdp_mesh(mesh: ParallelMesh, device_type: str) -> DeviceMesh:
    rows = mesh.group(*WEIGHT_AXES)
    ranks = torch.tensor(sorted(dist.get_process_group_ranks(mesh.group("replicate", *WEIGHT_AXES))))
    if mesh.shape.replicate == 1:
        return DeviceMesh.from_group([rows], device_type, mesh=ranks, mesh_dim_names=("shard",))
    groups, table = [mesh.group("replicate"), rows], ranks.view(mesh.shape.replicate, -1)
    return DeviceMesh.from_group(groups, device_type, mesh=table, mesh_dim_names=("replicate", "shard"))


def row_sizes(rows: int, ranks: int) -> tuple[int, ...]:
    """Return the number of rows of a weight on each rank. FSDP2 divides like `chunk`: the last ranks have fewer."""
    longest = -(-rows // ranks)
    return tuple(max(0, min(longest, rows - rank * longest)) for rank in range(ranks))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a plain tensor in the same memory; a plain tensor is returned itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Move trained weights and buffers to a device. Frozen weights may stay in host memory."""
    trained = (weight for weight in module.parameters() if weight.requires_grad)
    for tensor in (*trained, *module.buffers()):
        tensor.data = tensor.data.to(device)
    return module


@contextmanager
def joined_ranks(settings: TrainSettings, context: RankContext) -> Iterator[tuple[TrainSettings, Distribution]]:
    """Join the other ranks, and yield rank 0's settings and the distribution of work."""
    settings = settings_of_ranks(settings, context)
    with joined(context, device_type=device_type(settings.device)) as device:
        settings = agreed(settings)
        yield settings, distribution_of(settings, device=device)


def training_exchange(settings: TrainSettings) -> ExchangePlan:
    return plan_exchange(
        settings.parallel,
        mesh_shape(settings.strategy, settings.parallel),
        itemsize=torch_dtype(settings.precision.compute).itemsize,
    )


def training_device(settings: TrainSettings) -> torch.device:
    """Return the device of a process that trains alone. Raises HardwareError if the device is missing."""
    return pick_hardware(settings.device_name, "float32").device


def mesh_shape(strategy: Strategy, parallel: TrainParallelSettings) -> MeshShape:
    return MeshShape(**parallel.axes(strategy))


def distribution_of(
    settings: TrainSettings, *, device: torch.device, kind: type[Distribution] = Distribution
) -> Distribution:
    """Return the distribution of a run; a single process ignores the strategy."""
    shape, exchange = mesh_shape(settings.strategy, settings.parallel), training_exchange(settings)
    if shape.size == 1:
        return Distribution(device)
    mesh = ParallelMesh(shape, device_type=device.type)
    use_mesh(mesh)
    dtype = torch_dtype(settings.precision.compute)
    return kind(
        device,
        mesh,
        strategy=settings.strategy,
        dtype=None if dtype is torch.float32 else dtype,
        exchange=exchange,
        offload_states=settings.optimizer.offload_states,
    )
