"""Linear layers: plans for splitting them between ranks, and a layer with a low-rank update."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Split(StrEnum):
    """Split of a linear layer between ranks (Shoeybi et al. 2019, Megatron-LM)."""

    COLUMN = "column"
    """Each rank has some of the output features (rows of the weight, and the bias)."""
    ROW = "row"
    """Each rank has some of the input features (columns of the weight); outputs are summed, the bias is added once."""


@dataclass(frozen=True)
class ShardedLinear:
    """Sharding plan of one linear layer; `path` is the module path inside the block.

    The split features consist of parts of the sizes `pieces`, in order. Each part is split separately: a rank holds its
    share of the first, then its share of the second. `units` is the number of adjacent features in each piece that are
    never split: the width of a head, or 1. Ranks may have different numbers of units, but each at least one.
    """

    path: str
    split: Split
    pieces: tuple[int, ...]
    units: tuple[int, ...]


@runtime_checkable
class PartialLinear(Protocol):
    """Linear layer with its own multiplication instead of a product with the tensor `weight`."""

    def part(self, x: Tensor, features: slice) -> Tensor:
        """Return some of the output features; (..., in_features) -> (..., features)."""


def features_of(linear: nn.Module) -> Callable[[Tensor, slice], Tensor]:
    """Return a function that computes some output features of a linear layer, or of a module with its interface."""
    inner = linear.linear if isinstance(getattr(linear, "linear", None), nn.Module) else linear
    base = inner.base if isinstance(inner, LowRankLinear) else inner
    if isinstance(base, PartialLinear):
        multiply = base.part
        if not isinstance(inner, LowRankLinear):
            return multiply
        a_RI, b_OR = inner.lora_a, inner.lora_b
        return lambda x, features: _with_low_rank(multiply(x, features), x, a_RI, b_OR[features])
    weight: Tensor = linear.weight  # type: ignore[assignment]
    bias: Tensor | None = linear.bias  # type: ignore[assignment]
    return lambda x, features: functional.linear(x, weight[features], None if bias is None else bias[features])


def _with_low_rank(out: Tensor, x: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    low = functional.linear(x, a_RI)
    # In place because the output may be the widest tensor of a block.
    out.view(-1, out.shape[-1]).addmm_(low.reshape(-1, low.shape[-1]), b_OR.t())
    return out


class LowRankLinear(nn.Module):
    """Linear layer with the weight W + B·A, which leaves W unchanged. It is for inference.

    W belongs to `base`, an `nn.Linear` or a module with its interface. It may be mapped from a file, or stored in 8
    bits. The update needs memory for rank · (in_features + out_features) numbers, and is not rounded to the precision
    of W. `b_OR` includes its scale.
    """

    def __init__(self, base: nn.Module, a_RI: Tensor, b_OR: Tensor) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(a_RI, requires_grad=False)
        self.lora_b = nn.Parameter(b_OR, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """Sum (out_features, in_features), computed at each use."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        return torch.addmm(weight, self.lora_b, self.lora_a)

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.base.bias  # type: ignore[assignment]
        return bias

    def forward(self, features: Tensor) -> Tensor:
        """Return the layer's output; (..., in_features) -> (..., out_features)."""
        return _with_low_rank(self.base(features), features, self.lora_a, self.lora_b)
