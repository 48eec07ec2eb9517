"""Tensors that are computed from others while they are read."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from opensora_cli.checkpoint.entries import Entry

STEP_NUMEL = 2**20
"""How many elements are computed at a time: what is needed in between, often in fp32 and often twice, stays small."""


class ComputedEntry(Entry):
    """A tensor whose elements are computed in steps. These are the same for every range that is read.

    Args:
        shape: its sizes.
        dtype: of its elements.
        whole_rows: whether a step may not end inside a row.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, *, whole_rows: bool = False) -> None:
        super().__init__(shape, dtype)
        row_numel = max(1, self.row_numel) if whole_rows else 1
        self.step_numel = max(1, STEP_NUMEL // row_numel) * row_numel

    @abstractmethod
    def compute(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop`, all of one step and at least one, in `dtype` and of one dimension."""

    def elements(self, start: int, stop: int) -> Tensor:
        """Compute elements `start` to `stop`, step by step."""
        result = torch.empty(stop - start, dtype=self.dtype)
        step = self.step_numel
        for begin in range(start - start % step, stop, step):
            first, last = max(start, begin), min(stop, begin + step)
            result[first - start : last - start] = self.compute(first, last)
        return result
