"""How the linear layers of a block are divided among ranks, as plain data."""

from dataclasses import dataclass
from enum import StrEnum


class Split(StrEnum):
    """How a linear layer is divided among ranks (Shoeybi et al. 2019, Megatron-LM)."""

    COLUMN = "column"
    """Each rank has some of the output features (rows of the weight, and the bias)."""
    ROW = "row"
    """Each rank has some of the input features (columns of the weight); outputs are summed, the bias is added once."""


@dataclass(frozen=True)
class ShardedLinear:
    """One linear layer of the sharding plan.

    Args:
        path: module path inside the block.
        split: by output or by input features.
        pieces: sizes of the parts that the divided features consist of, in order. Each part is divided by itself: a
            rank holds its share of the first, then its share of the second.
        units: for each piece, how many neighbouring features stay together: the width of a head, or 1. Ranks need not
            have equally many units, but each at least one.
    """

    path: str
    split: Split
    pieces: tuple[int, ...]
    units: tuple[int, ...]
