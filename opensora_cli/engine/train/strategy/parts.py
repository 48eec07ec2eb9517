"""Which part of each weight a rank holds: a share of its features, and of that some rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.models.linears import Split
from opensora_cli.models.mmdit import MMDiT, MMDiTConfig
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.parallel.collectives import all_gather
from opensora_cli.parallel.shares import span
from opensora_cli.parallel.tensor import FeatureCut, shard_linears


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
