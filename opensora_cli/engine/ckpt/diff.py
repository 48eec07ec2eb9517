"""`osora ckpt diff`: compare two checkpoints in any formats."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from opensora_cli.checkpoint.fp8 import dequantize, without_scales
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.transforms import only
from opensora_cli.core.choices import Selection
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import plain
from opensora_cli.core.limits import freed_at_once
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.engine.ckpt.inspect import dtype_name
from opensora_cli.settings.ckpt import DiffSettings

_STEP_NUMEL = 2**20
"""Elements per step. They fit in the processor's cache, even in fp64."""


class ValueDifference(Document):
    """Difference of the values of a tensor that is in both checkpoints."""

    differing: int
    """Elements that differ, or that differ by more than the tolerance."""
    largest_difference: float
    """Largest absolute difference of finite numbers."""


class Difference(Document):
    """Differences between two checkpoints."""

    SCHEMA: ClassVar[str | None] = "osora.ckpt.diff/1"

    first: str
    second: str
    rtol: float
    atol: float
    equal: bool
    """Whether the checkpoints are equal; with a tolerance, dtypes may differ."""
    compared: int
    """Tensors whose values were compared."""
    largest_difference: float
    """Largest absolute difference of two values, over all tensors."""
    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    dtypes: dict[str, tuple[str, str]]
    values: dict[str, ValueDifference]
    """Differences by the name of the tensor; tensors with equal values are missing."""

    def raise_for_problems(self) -> None:
        """Raise CheckpointError if there is a difference."""
        if not self.equal:
            raise CheckpointError(f"{self.first} and {self.second} differ")

    def lines(self) -> list[str]:
        """Return the differences for people."""
        pairs = Counter(f"{first} and {second}" for first, second in self.dtypes.values())
        return [
            *(f"only in the first   {plain(name)}" for name in self.only_in_first),
            *(f"only in the second  {plain(name)}" for name in self.only_in_second),
            *(f"shape   {plain(name)}: {list(a)} and {list(b)}" for name, (a, b) in self.shapes.items()),
            *(f"dtype   {count} tensors are {pair}" for pair, count in pairs.items()),
            *(
                f"values  {plain(name)}: {each.differing:,} differ, by at most {each.largest_difference:.4g}"
                for name, each in self.values.items()
            ),
            f"{'equal' if self.equal else 'different'}: {self.compared} tensors compared, "
            f"largest difference {self.largest_difference:.4g}",
        ]


def diff(settings: DiffSettings, *, reporter: Reporter | None = None) -> Difference:
    """Compare two checkpoints piece by piece.

    Without a tolerance every bit must be the same, dtypes included. With one, |first - second| must be at most
    atol + rtol x |second|, NaN equals NaN, and 8-bit tensors are multiplied by their scales.

    Raises:
        RequestError: a pattern matches no tensor of either checkpoint.
        CheckpointError: a checkpoint is missing or broken, or, with a tolerance, has scales of an unknown kind.
    """
    reporter = reporter or SilentReporter()
    first, second = (_open(path, settings.select) for path in (settings.first, settings.second))
    numbers = first, second
    if not settings.is_exact:
        # Before `only`, which may drop scales.
        numbers = dequantize(first, torch.float32), dequantize(second, torch.float32)
        first, second = without_scales(first), without_scales(second)
    if settings.only:
        chosen = only({**second, **first}, settings.only)
        first, second = ({name: each[name] for name in each if name in chosen} for each in (first, second))
    both = [name for name in first if name in second]
    shapes = {name: (first[name].shape, second[name].shape) for name in both if first[name].shape != second[name].shape}
    comparable = [name for name in both if name not in shapes]
    values = {}
    largest = 0.0
    total = sum(first[name].nbytes + second[name].nbytes for name in comparable)
    with freed_at_once(), reporter.stage("compare", total=total, unit=BYTES) as progress:
        for name in comparable:
            found = _compare(numbers[0][name], numbers[1][name], settings)
            largest = max(largest, found.largest_difference)
            if found.differing:
                values[name] = found
            progress.advance(first[name].nbytes + second[name].nbytes)
    only_in_first = tuple(name for name in first if name not in second)
    only_in_second = tuple(name for name in second if name not in first)
    dtypes = {
        name: (dtype_name(first[name].dtype), dtype_name(second[name].dtype))
        for name in comparable
        if first[name].dtype != second[name].dtype
    }
    return Difference(
        first=settings.first,
        second=settings.second,
        rtol=settings.rtol,
        atol=settings.atol,
        equal=not (only_in_first or only_in_second or shapes or values or (settings.is_exact and dtypes)),
        compared=len(comparable),
        largest_difference=largest,
        only_in_first=only_in_first,
        only_in_second=only_in_second,
        shapes=shapes,
        dtypes=dtypes,
        values=values,
    )


def _open(path: str, select: Selection | None) -> Mapping[str, LazyTensor]:
    """Return the tensors of a checkpoint, or the selected ones if there is a choice."""
    checkpoint = open_checkpoint(Path(path))
    if select is not None and checkpoint.selections:
        checkpoint = open_checkpoint(Path(path), select=select)
    return checkpoint.entries


def _compare(first: LazyTensor, second: LazyTensor, settings: DiffSettings) -> ValueDifference:
    """Compare two tensors of one shape, `_STEP_NUMEL` elements at a time."""
    differing, largest = 0, 0.0
    same_dtype = first.dtype == second.dtype
    for pair in zip(steps(first), steps(second), strict=True):
        bits = [piece.contiguous().view(torch.uint8) for piece in pair]
        if same_dtype and torch.equal(*bits):
            continue
        a, b = (as_real_numbers(piece).double() for piece in pair)
        distance = (a - b).abs()
        largest = max(largest, float(distance.where(distance.isfinite(), 0.0).max()))
        if settings.is_exact and same_dtype:
            differs = bits[0] != bits[1]
            differing += int(differs.view(len(pair[0]), -1).any(dim=1).sum())
        else:
            close = torch.isclose(a, b, rtol=settings.rtol, atol=settings.atol, equal_nan=True)
            differing += int((~close).sum())
    return ValueDifference(differing=differing, largest_difference=largest)


def steps(entry: LazyTensor) -> Iterator[Tensor]:
    """Read a tensor, and yield it in pieces of `_STEP_NUMEL` elements. An empty tensor has none."""
    yield from torch.split(entry.read().reshape(-1), _STEP_NUMEL) if entry.numel else ()


def as_real_numbers(piece: Tensor) -> Tensor:
    """Return elements as fp32 if it can represent their dtype, else as fp64. Complex numbers become two elements."""
    if piece.dtype.is_complex:
        wide = torch.promote_types(piece.dtype, torch.complex64)
        piece = torch.view_as_real(piece.to(wide)).reshape(-1)
    is_small_float = piece.dtype.is_floating_point and piece.dtype.itemsize <= 4
    return piece.to(torch.float32 if is_small_float else torch.float64)
