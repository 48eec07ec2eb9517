"""Ranks that hold shares of the model: FSDP2 (Zhao et al. 2023), and ranks that share a sample.

Of each weight a rank holds a share of its features, and of that some rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from opensora_cli.engine.train.strategy.distribution import Distribution, local
from opensora_cli.models.linears import Split
from opensora_cli.models.mmdit.blocks import SEQUENCE_INPUTS, TEXT_SEQUENCE_INPUTS, repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.all_to_all import ExchangePlan, open_route
from opensora_cli.parallel.collectives import all_gather
from opensora_cli.parallel.mesh import ParallelMesh
from opensora_cli.parallel.sequence import SequenceParallel, sequence_attention
from opensora_cli.parallel.shares import SequenceLengths, span
from opensora_cli.parallel.tensor import FeatureCut, shard_linears

_WEIGHTS = ("shard", "ring", "ulysses")
"""Axes between whose ranks rows of weights are divided: ranks that share tokens have gradients to be summed, too."""


class ShardedDistribution(Distribution):
    """Every rank holds some rows of each weight, of its gradient, and of what the optimizer keeps for it.

    Weights are gathered block by block; the weights outside of blocks once for forward and backward. Between tensor-
    parallel ranks features are divided first, and tokens of a sample between those of `ring` and `ulysses`.

    Args:
        mesh: `replicate` copies of weights that are divided along `shard`, `ring` and `ulysses`.
        dtype: in which weights are gathered and computed with; gradients are summed in fp32. None: that of the weights.
        gathers_twice: let go of a block's weights after its forward, and gather them again for its backward (ZeRO-3).
            Otherwise they are held from the first forward of an update to its last backward.
        exchanges_once: keep whole gradients until the last micro-batch of an update (ZeRO-1). Otherwise those of each
            micro-batch are shared out in its backward pass.
        exchange: how ranks that share tokens exchange them for heads; None: directly, as they are.
    """

    divides = True

    def __init__(
        self,
        device: torch.device,
        mesh: ParallelMesh,
        *,
        dtype: torch.dtype | None,
        gathers_twice: bool,
        exchanges_once: bool,
        exchange: ExchangePlan | None = None,
    ) -> None:
        super().__init__(device, mesh)
        self._exchange = exchange or ExchangePlan()
        # What the main rank sees is what is logged.
        self._route = open_route(mesh, self._exchange, self.monitor if self.is_main else None)
        self._gathers_twice = gathers_twice
        self._exchanges_once = exchanges_once
        # The model casts what it is given itself, and the rotary tables of its blocks have to stay in fp32.
        self._precision = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32, cast_forward_inputs=False
        )
        self._rows = mesh.group(*_WEIGHTS)
        self._features = mesh.group("tensor")
        self._parts = mesh.group(*_WEIGHTS, "tensor")
        self._fsdp_mesh = _fsdp_mesh(mesh, device.type)
        self._groups: list[FSDPModule] = []
        self._layouts: dict[str, WeightLayout] = {}
        self._rows_of: dict[str, int] = {}
        self._norms: list[nn.Parameter] = []

    def shard(self, module: nn.Module) -> Callable[..., Tensor]:
        """Leave this rank its part of a transformer; once.

        Block by block goes to the device, so that it never holds the whole. A transformer on the meta device gets
        memory of its part only, to be filled by way of `part`.
        Raises ValueError if the module is no transformer, or there was one before, and RequestError if there are more
        tensor-parallel ranks than heads.
        """
        if not isinstance(module, MMDiT) or self._groups:
            raise ValueError(f"weights of one MMDiT are divided, not of a {type(module).__name__} or a second one")
        assert self.mesh is not None
        self._layouts = cut_features(module, self._features)
        self._rows_of = {name: parameter.shape[0] for name, parameter in module.named_parameters()}
        # FSDP2 hooks into the result's gradient and warns of a result that is a view.
        module.register_forward_hook(_in_memory_of_its_own)
        for stack in repeated_blocks(module.config):
            for block in module.get_submodule(stack.module_path).children():
                self._divide_rows(block, gathers_twice=self._gathers_twice)
        self._divide_rows(module, gathers_twice=False)
        if any(parameter.is_meta for parameter in module.parameters()):
            module.to_empty(device=self.device)
        if self.mesh.shape.tensor > 1:
            self._norms = [module.get_parameter(name) for name in norms_of_heads(module.config)]
        return self._with_divided_tokens(module)

    def _divide_rows(self, module: nn.Module, *, gathers_twice: bool) -> None:
        group = fully_shard(
            module, mesh=self._fsdp_mesh, reshard_after_forward=gathers_twice, mp_policy=self._precision
        )
        # As a sum and a scaling: gloo has no mean.
        group.set_force_sum_reduction_for_comms(True)
        # Ranks that share a sample have summands of its gradient. Where none are divided, torch (2.13) would divide by
        # this number twice, and does so once without it.
        if self._rows.size() > 1:
            group.set_gradient_divide_factor(float(self.data_ranks))
        self._groups.append(group)

    def _with_divided_tokens(self, module: MMDiT) -> Callable[..., Tensor]:
        mesh = self.mesh
        assert mesh is not None
        if mesh.shape.ring * mesh.shape.ulysses == 1:
            return module
        lengths = SequenceLengths.of_mesh(mesh)
        module.set_attention(
            sequence_attention(module.attention, mesh, lengths, plan=self._exchange, route=self._route)
        )
        return SequenceParallel(
            module,
            mesh.group("ring", "ulysses"),
            lengths,
            sequence_inputs=SEQUENCE_INPUTS,
            text_sequence_inputs=TEXT_SEQUENCE_INPUTS,
        )

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Reduce-scatter gradients, and keep gathered weights, as the strategy has it."""
        for group in self._groups:
            group.set_requires_gradient_sync(last or not self._exchanges_once, recurse=False)
            group.set_reshard_after_backward(last or self._gathers_twice, recurse=False)
        yield
        if last:
            self._sum_gradients_of_norms()

    def _sum_gradients_of_norms(self) -> None:
        gradients = [local(norm.grad) for norm in self._norms if norm.grad is not None]
        if gradients:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self._features)
            for gradient, summed in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let go of gathered weights at the end, which no backward pass does here: they would not be updated."""
        try:
            yield
        finally:
            for group in self._groups:
                group.reshard()

    def whole_name(self, name: str) -> str:
        """Return what a parameter of the sharded transformer is called in the whole one."""
        return self._layouts[name].whole_name if name in self._layouts else name

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Gather rows, then features."""
        own = local(tensor.detach())
        if name not in self._layouts:
            return own
        return self._layouts[name].gathered(own, rows=self._rows_of[name], shard=self._rows, tensor=self._features)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Cut features, then rows."""
        if name not in self._layouts:
            return super().part(name, whole)
        return self._layouts[name].own(whole, shard=self._rows, tensor=self._features)

    def _counts(self, name: str) -> bool:
        return self._layouts[name].cut is not None or self._features.rank() == 0

    def _summed_over_parts(self, squares: Tensor) -> Tensor:
        dist.all_reduce(squares, group=self._parts)
        return squares


def _fsdp_mesh(mesh: ParallelMesh, device_type: str) -> DeviceMesh:
    # All axes that rows are divided along are one to FSDP2.
    rows = mesh.group(*_WEIGHTS)
    ranks = torch.tensor(sorted(dist.get_process_group_ranks(mesh.group("replicate", *_WEIGHTS))))
    if mesh.shape.replicate == 1:
        return DeviceMesh.from_group([rows], device_type, mesh=ranks, mesh_dim_names=("shard",))
    return DeviceMesh.from_group(
        [mesh.group("replicate"), rows],
        device_type,
        mesh=ranks.view(mesh.shape.replicate, -1),
        mesh_dim_names=("replicate", "shard"),
    )


def _in_memory_of_its_own(module: nn.Module, inputs: object, result: Tensor) -> Tensor:
    return result.clone() if result._is_view() else result


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """How one weight is divided."""

    whole_name: str
    """In the model of one process."""
    cut: FeatureCut | None
    """By features, between tensor-parallel ranks; None: all of them have all features."""

    def gathered(self, own: Tensor, *, rows: int, shard: dist.ProcessGroup, tensor: dist.ProcessGroup) -> Tensor:
        """Return the whole of `own`: over `shard`, `rows` in all, and then over `tensor`, which divides features."""
        share = all_gather(own, shard, dim=0, sizes=row_sizes(rows, dist.get_world_size(shard)))
        if self.cut is None:
            return share
        shares = all_gather(share, tensor, dim=self.cut.dim, sizes=self.cut.sizes)
        return self.cut.join(torch.split(shares, list(self.cut.sizes), self.cut.dim))

    def own(self, whole: Tensor, *, shard: dist.ProcessGroup, tensor: dist.ProcessGroup) -> Tensor:
        """Return a copy of what this rank holds of a whole."""
        share = whole.detach() if self.cut is None else self.cut.cut(whole, dist.get_rank(tensor))
        rows = row_sizes(share.shape[0], dist.get_world_size(shard))
        return share[span(rows, dist.get_rank(shard))].clone(memory_format=torch.contiguous_format)


def row_sizes(rows: int, ranks: int) -> tuple[int, ...]:
    """Return how many rows of a weight each rank has by FSDP2, which gives all but the last ones as many: `chunk`."""
    longest = -(-rows // ranks)
    return tuple(max(0, min(longest, rows - rank * longest)) for rank in range(ranks))


def cut_features(transformer: MMDiT, group: dist.ProcessGroup) -> dict[str, WeightLayout]:
    """Leave a transformer this rank's heads and features of its blocks; return how each parameter is divided.

    Of the norms of queries and keys every rank then has the gradients of its own heads only: see `norms_of_heads`.
    A hook on them, as generating a gradient has it, would not outlive that FSDP2 replaces the parameters. Raises
    RequestError if there are more ranks than heads.
    """
    ranks = dist.get_world_size(group)
    layouts = {name: WeightLayout(name, None) for name, _ in transformer.named_parameters()}
    if ranks == 1:
        return layouts
    for stack in repeated_blocks(transformer.config):
        for block in transformer.get_submodule(stack.module_path).children():
            shard_linears(block, stack.linears, group)
    for whole_name, cut in feature_cuts(transformer.config, ranks).items():
        if whole_name in layouts:
            del layouts[whole_name]
            path, kind = whole_name.rsplit(".", 1)
            layouts[f"{path}.linear.{kind}"] = WeightLayout(whole_name, cut)
    return layouts


def feature_cuts(config: MMDiTConfig, ranks: int) -> dict[str, FeatureCut]:
    """Return how so many ranks divide the features of weights and biases, by their names in the whole model.

    Layers need not have all of these biases. Raises RequestError if there are more ranks than heads.
    """
    cuts = {}
    for stack in repeated_blocks(config):
        for index, plan in product(range(stack.count), stack.linears):
            path = f"{stack.module_path}.{index}.{plan.path}"
            cuts[f"{path}.weight"] = FeatureCut.of_weight(plan, ranks)
            if plan.split is Split.COLUMN:
                cuts[f"{path}.bias"] = FeatureCut.of_bias(plan, ranks)
    return cuts


def norms_of_heads(config: MMDiTConfig) -> Iterator[str]:
    """Yield the names of the parameters that all heads use, and whose gradients are a sum over all heads."""
    for stack in repeated_blocks(config):
        for index in range(stack.count):
            yield from (f"{stack.module_path}.{index}.{path}" for path in stack.used_by_all_heads)
