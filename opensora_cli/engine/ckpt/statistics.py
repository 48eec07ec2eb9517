"""Statistics of the numbers of a tensor."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.core.documents import Document

STEP_NUMEL = 2**20
"""Elements per step. They fit in the processor's cache, even in fp64."""


@dataclass(slots=True)
class TensorStatistics:
    """Statistics of the elements that were added.

    `smallest`, `largest` and `mean` cover finite elements, and are None without any. A complex number counts as two.
    """

    count: int = 0
    nan: int = 0
    infinite: int = 0
    smallest: float | None = None
    largest: float | None = None
    _sum: float = 0.0

    @classmethod
    def of(cls, entry: LazyTensor, *, advance: Callable[[int], None]) -> "TensorStatistics":
        """Read a tensor piece by piece, and call `advance` with the bytes of each piece."""
        statistics = cls()
        for piece in steps(entry):
            statistics.add(piece)
            advance(piece.nbytes)
        return statistics

    @property
    def mean(self) -> float | None:
        """Mean of the finite elements."""
        finite = self.count - self.nan - self.infinite
        return self._sum / finite if finite else None

    @property
    def is_finite(self) -> bool:
        """Whether every element is a finite number."""
        return not self.nan and not self.infinite

    @property
    def is_all_zero(self) -> bool:
        """Whether there are elements, and all are zero."""
        return self.is_finite and self.smallest == self.largest == 0

    def add(self, piece: Tensor) -> None:
        """Add elements, at least one."""
        values = as_real_numbers(piece)
        self.count += values.numel()
        low, high = (float(bound) for bound in values.aminmax())
        # A NaN makes both NaN.
        if not (math.isfinite(low) and math.isfinite(high)):
            nan = int(values.isnan().sum())
            self.nan += nan
            finite = values[values.isfinite()]
            self.infinite += values.numel() - finite.numel() - nan
            if not finite.numel():
                return
            values = finite
            low, high = (float(bound) for bound in values.aminmax())
        self.smallest = low if self.smallest is None else min(self.smallest, low)
        self.largest = high if self.largest is None else max(self.largest, high)
        self._sum += float(values.sum(dtype=torch.float64))

    def document(self) -> "StatisticsDocument":
        """Return the statistics as a document."""
        mean = self.mean
        return StatisticsDocument(
            nan=self.nan,
            infinite=self.infinite,
            all_zero=self.is_all_zero,
            min=self.smallest,
            max=self.largest,
            mean=mean if mean is not None and math.isfinite(mean) else None,
        )


class StatisticsDocument(Document):
    """Statistics of a tensor; a mean whose sum overflows fp64 is null."""

    nan: int
    infinite: int
    all_zero: bool
    min: float | None
    max: float | None
    mean: float | None


def steps(entry: LazyTensor) -> Iterator[Tensor]:
    """Read a tensor, and yield it in pieces of `STEP_NUMEL` elements. An empty tensor has none."""
    yield from torch.split(entry.read().reshape(-1), STEP_NUMEL) if entry.numel else ()


def as_real_numbers(piece: Tensor) -> Tensor:
    """Return elements as fp32 if it can represent their dtype, else as fp64. Complex numbers become two elements."""
    if piece.dtype.is_complex:
        wide = torch.promote_types(piece.dtype, torch.complex64)
        piece = torch.view_as_real(piece.to(wide)).reshape(-1)
    is_small_float = piece.dtype.is_floating_point and piece.dtype.itemsize <= 4
    return piece.to(torch.float32 if is_small_float else torch.float64)


def as_integers(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return integers and booleans as int64 with the same distances; None for other dtypes, or if int64 is too small.

    Two uint64 tensors are shifted down by 2^63 to fit.
    """
    if any(piece.dtype.is_floating_point or piece.dtype.is_complex for piece in (first, second)):
        return None
    if first.dtype == second.dtype == torch.uint64:
        lowest = torch.iinfo(torch.int64).min
        return first.view(torch.int64) ^ lowest, second.view(torch.int64) ^ lowest
    if torch.uint64 in (first.dtype, second.dtype):
        return None
    return first.long(), second.long()
