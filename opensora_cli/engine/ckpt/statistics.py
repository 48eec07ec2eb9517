"""Statistics of the numbers of a tensor."""

import math
from collections.abc import Callable, Iterator

import torch
from pydantic import Field
from torch import Tensor

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.core.documents import Document

STEP_NUMEL = 2**20
"""Elements per step. They fit in the processor's cache, even in fp64."""


class Statistics(Document):
    """Statistics of a tensor. A complex number counts as two."""

    count: int = Field(exclude=True)
    nan: int
    infinite: int
    all_zero: bool
    """Whether there are elements, and all are zero."""
    min: float | None
    """Smallest finite element; None without any."""
    max: float | None
    mean: float | None
    """Mean of the finite elements; None without any, and if their sum overflows fp64."""

    @property
    def is_finite(self) -> bool:
        """Whether every element is a finite number."""
        return not self.nan and not self.infinite


def measure(entry: LazyTensor, *, advance: Callable[[int], None]) -> Statistics:
    """Read a tensor and return its statistics. `advance` is called with the bytes of each step."""
    count = nan = finite = 0
    low, high, total = math.inf, -math.inf, 0.0
    for piece in steps(entry):
        values = as_real_numbers(piece)
        count += values.numel()
        bounds = values.aminmax()
        # A NaN makes both bounds NaN.
        if not (bounds.min.isfinite() and bounds.max.isfinite()):
            nan += int(values.isnan().sum())
            values = values[values.isfinite()]
        if values.numel():
            bounds = values.aminmax()
            low, high = min(low, float(bounds.min)), max(high, float(bounds.max))
            total += float(values.sum(dtype=torch.float64))
        finite += values.numel()
        advance(piece.nbytes)
    return Statistics(
        count=count,
        nan=nan,
        infinite=count - nan - finite,
        all_zero=count == finite and low == high == 0,
        min=low if finite else None,
        max=high if finite else None,
        mean=total / finite if finite and math.isfinite(total) else None,
    )


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
