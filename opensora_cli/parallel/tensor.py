"""Tensor parallelism (Shoeybi et al. 2019, Megatron-LM): ranks divide the heads and features of each block.

All ranks hold the same tokens. Between a layer divided by its output features and the next one, divided by its input
features, each rank computes with its own features; one sum over the ranks ends the pair.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_cli.core.exceptions import RequestError
from opensora_cli.parallel.collectives import all_reduce_sum, copy_to_group
from opensora_cli.parallel.shares import shares, span

if TYPE_CHECKING:
    from opensora_cli.models.linears import ShardedLinear


@dataclass(frozen=True, slots=True)
class FeatureCut:
    """Division of a weight or a bias by features."""

    dim: int
    """Dimension of the features."""
    spans: tuple[tuple[slice, ...], ...]
    """Slices of each rank's parts in the whole, one for each piece of the plan."""

    @classmethod
    def of_weight(cls, plan: "ShardedLinear", ranks: int) -> "FeatureCut":
        """Return the division of a linear layer's weight between `ranks` ranks.

        It is that of the bias, too, if output features are divided; other biases stay whole. Raises RequestError if
        there are more ranks than units in a piece.
        """
        return cls(0 if plan.split == "column" else 1, tuple(_spans(plan, ranks, rank) for rank in range(ranks)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of features of each rank."""
        return tuple(sum(part.stop - part.start for part in spans) for spans in self.spans)

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Return a copy of the share of one rank, without gradients."""
        parts = [whole.detach().narrow(self.dim, part.start, part.stop - part.start) for part in self.spans[rank]]
        # `cat` also copies a single part.
        return torch.cat(parts, self.dim)

    def join(self, shares_of_ranks: Sequence[Tensor]) -> Tensor:
        """Return the whole from the shares of all ranks; inverse of `cut`."""
        shape = list(shares_of_ranks[0].shape)
        shape[self.dim] = sum(self.sizes)
        whole = shares_of_ranks[0].new_empty(shape)
        for share, spans in zip(shares_of_ranks, self.spans, strict=True):
            lengths = [part.stop - part.start for part in spans]
            for part, piece in zip(spans, torch.split(share, lengths, self.dim), strict=True):
                whole.narrow(self.dim, part.start, part.stop - part.start).copy_(piece)
        return whole


class ColumnLinear(nn.Module):
    """Linear layer with some of the output features; the other ranks of `group` have the others."""

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        # A separate layer, so that code that replaces linear layers keeps the exchange around it.
        self.linear = linear
        self._group = group

    @property
    def weight(self) -> Tensor:
        """Rows of this rank, (out_features, in_features)."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's output features for inputs of all ranks; (..., in_features) -> (..., out_features)."""
        out: Tensor = self.linear(copy_to_group(x, self._group))
        return out


class RowLinear(nn.Module):
    """Linear layer with some of the input features; the other ranks of `group` have the others.

    `linear` has no bias. `bias` is that of the whole layer, and is added after the sum.
    """

    def __init__(self, linear: nn.Linear, bias: nn.Parameter | None, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear = linear
        self.bias = bias
        self._group = group

    @property
    def weight(self) -> Tensor:
        """Columns of this rank, (out_features, in_features)."""
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, the same on all ranks; (..., in_features) -> (..., out_features)."""
        out = all_reduce_sum(self.linear(x), self._group)
        return out if self.bias is None else out + self.bias


def shard_linears(
    block: nn.Module,
    linears: Iterable["ShardedLinear"],
    group: dist.ProcessGroup,
    *,
    used_by_all_heads: Iterable[str] = (),
) -> None:
    """Replace linear layers inside a block by this rank's shares, one after the other.

    Only the share is copied: weights may be mapped from a file, or be on the meta device. If the loss counts once,
    gradients of shares are those of the whole layer's features, and all other gradients are whole on every rank. The
    parameters `used_by_all_heads` stay whole, but each rank computes a part of their gradients. Backward sums these
    parts for parameters that now require a gradient. Raises RequestError if there are more ranks than units in a piece,
    and ValueError if a layer is no plain `nn.Linear`, or does not have the features of the plan.
    """
    for plan in linears:
        whole = block.get_submodule(plan.path)
        if type(whole) is not nn.Linear:
            raise ValueError(f"{plan.path} is a {type(whole).__name__}, not an nn.Linear as at first")
        block.set_submodule(plan.path, _share(whole, plan, group))
    for path in used_by_all_heads:
        parameter = block.get_parameter(path)
        if parameter.requires_grad:
            parameter.register_hook(partial(all_reduce_sum, group=group))  # type: ignore[no-untyped-call]


def _share(whole: nn.Linear, plan: "ShardedLinear", group: dist.ProcessGroup) -> nn.Module:
    by_rows = plan.split == "column"
    features = whole.out_features if by_rows else whole.in_features
    if sum(plan.pieces) != features:
        raise ValueError(f"{plan.path} has {features} features, not {plan.pieces}")
    cut, rank = FeatureCut.of_weight(plan, dist.get_world_size(group)), dist.get_rank(group)
    weight = _cut(whole.weight, cut, rank)
    bias = _cut(whole.bias, cut, rank) if by_rows and whole.bias is not None else None
    # Created on meta because the initial values are not used.
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = weight
    if bias is not None:
        linear.bias = bias
    share = ColumnLinear(linear, group) if by_rows else RowLinear(linear, whole.bias, group)
    return share.train(whole.training)


def _cut(whole: Tensor, cut: FeatureCut, rank: int) -> nn.Parameter:
    return nn.Parameter(cut.cut(whole, rank), requires_grad=whole.requires_grad)


def _spans(plan: "ShardedLinear", ranks: int, rank: int) -> tuple[slice, ...]:
    spans, start = [], 0
    for piece, unit in zip(plan.pieces, plan.units, strict=True):
        units = piece // unit
        if units < ranks:
            raise RequestError(f"tensor_parallel_degree={ranks} is over the {units} parts of {plan.path}")
        own = span([count * unit for count in shares(units, ranks)], rank)
        spans.append(slice(start + own.start, start + own.stop))
        start += piece
    return tuple(spans)
