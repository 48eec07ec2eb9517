"""Tensors that are made of others while they are read: cast, cut, joined, reordered, padded, computed or strided."""

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from opensora_cli.checkpoint.stream import Entry, Extent, cut_extents
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import plain

STEP_NUMEL = 2**20
"""How many elements are computed at a time: what is needed in between, often in fp32 and often twice, stays small."""

_MOST_KEPT = 2


class CastEntry(Entry):
    """Another entry in another dtype, rounded element by element as torch does; `name` is for errors."""

    def __init__(self, base: Entry, dtype: torch.dtype, *, name: str) -> None:
        super().__init__(base.shape, dtype)
        self._base = base
        self._name = name

    def elements(self, start: int, stop: int) -> Tensor:
        return rounded(self._base.elements(start, stop), self.dtype, name=self._name)


class RowsEntry(Entry):
    """Rows `start` to `stop` of another entry of one dimension or more."""

    def __init__(self, base: Entry, start: int, stop: int) -> None:
        super().__init__((stop - start, *base.shape[1:]), base.dtype)
        self._base = base
        self._first = start * base.row_numel

    def extents(self) -> tuple[Extent, ...] | None:
        extents = self._base.extents()
        if extents is None:
            return None
        start = self._first * self.dtype.itemsize
        return tuple(cut_extents(extents, start, start + self.nbytes))

    def elements(self, start: int, stop: int) -> Tensor:
        return self._base.elements(self._first + start, self._first + stop)


class JoinedEntry(Entry):
    """The rows of several entries of one dtype, and of one shape but for the number of rows."""

    def __init__(self, parts: Sequence[Entry]) -> None:
        kinds = {(part.dtype, part.shape[1:]) for part in parts}
        if len(kinds) != 1:
            raise ValueError(f"rows of different kinds cannot be joined: {sorted(map(str, kinds))}")
        super().__init__((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), parts[0].dtype)
        self._parts = tuple(parts)
        self._ends = list(accumulate(part.numel for part in parts))

    def extents(self) -> tuple[Extent, ...] | None:
        runs: list[Extent] = []
        for part in self._parts:
            extents = part.extents()
            if extents is None:
                return None
            runs += extents
        return tuple(runs)

    def elements(self, start: int, stop: int) -> Tensor:
        read = []
        index = bisect_right(self._ends, start)
        while start < stop:
            part, end = self._parts[index], min(stop, self._ends[index])
            first = self._ends[index] - part.numel
            read.append(part.elements(start - first, end - first))
            start, index = end, index + 1
        return read[0] if len(read) == 1 else torch.cat([*read, torch.empty(0, dtype=self.dtype)])


class ReorderedEntry(Entry):
    """Another entry's rows in another order within each group of them: `order` has the old places of the new rows."""

    def __init__(self, base: Entry, order: Sequence[int]) -> None:
        super().__init__(base.shape, base.dtype)
        self._base = base
        self._order = torch.tensor(order)

    def elements(self, start: int, stop: int) -> Tensor:
        rows = len(self._order)
        group_numel = rows * self.row_numel
        if start == stop:
            return self._base.elements(0, 0)
        first, last = start // group_numel, -(-stop // group_numel)
        groups = self._base.rows(first * rows, last * rows).view(last - first, rows, self.row_numel)
        reordered = groups[:, self._order].reshape(-1)
        return reordered[start - first * group_numel : stop - first * group_numel]


class PaddedEntry(Entry):
    """Another entry's rows between rows of zeros: `rows` in all, its first one at `start`."""

    def __init__(self, base: Entry, *, start: int, rows: int) -> None:
        super().__init__((rows, *base.shape[1:]), base.dtype)
        self._base = base
        self._first = start * base.row_numel

    def elements(self, start: int, stop: int) -> Tensor:
        result = torch.zeros(stop - start, dtype=self.dtype)
        first, last = max(start, self._first), min(stop, self._first + self._base.numel)
        if first < last:
            result[first - start : last - start] = self._base.elements(first - self._first, last - self._first)
        return result


def rounded(values: Tensor, dtype: torch.dtype, *, name: str) -> Tensor:
    """Return numbers, of one dimension, in another dtype.

    Raises:
        CheckpointError: finite numbers of the tensor `name` would become infinite.
    """
    result = values.to(dtype)
    if _may_overflow(values, dtype) and bool((result.isinf() & values.isfinite()).any()):
        raise CheckpointError(
            f"{plain(name)} has numbers that are too large for {str(dtype).removeprefix('torch.')}",
            hint="choose bf16 for it" if dtype is torch.float16 else "choose fp32 for it, or leave it as it is",
        )
    return result


def _may_overflow(values: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the largest of `values` might not fit, at the cost of one fast product."""
    if not (values.dtype.is_floating_point and dtype.is_floating_point):
        return False
    largest = torch.finfo(dtype).max
    if torch.finfo(values.dtype).max <= largest:
        return False
    wide = values if values.dtype.itemsize >= 4 else values.float()
    return not math.sqrt(torch.dot(wide, wide)) < largest


class ComputedEntry(Entry):
    """A tensor whose elements are computed in steps. These are the same for every range that is read.

    With `whole_rows` no step ends inside a row.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, *, whole_rows: bool = False) -> None:
        super().__init__(shape, dtype)
        row_numel = max(1, self.row_numel) if whole_rows else 1
        self.step_numel = max(1, STEP_NUMEL // row_numel) * row_numel

    @abstractmethod
    def compute(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop`, all of one step and at least one, in `dtype` and of one dimension."""

    def elements(self, start: int, stop: int) -> Tensor:
        result = torch.empty(stop - start, dtype=self.dtype)
        step = self.step_numel
        for begin in range(start - start % step, stop, step):
            first, last = max(start, begin), min(stop, begin + step)
            result[first - start : last - start] = self.compute(first, last)
        return result


class StridedEntry(Entry):
    """A view of a longer tensor, such as a transposed one or some of its columns.

    Any part of a transposed matrix lies all over the file. So a view is read as a whole, once and in the order of the
    file, and kept until its last element was read or two other views were read: `diff` reads two at a time. Reading
    takes the memory of the view and of `STEP_NUMEL` elements of `base`.

    Args:
        shape: its sizes: one dimension or more, and no zero.
        stride: distance in elements of `base` for each dimension; none is negative.
        base: the tensor of one dimension that it is a view of, from its first element to its last.
    """

    kept: ClassVar[list["StridedEntry"]] = []
    """The views that hold their elements, the oldest first."""

    def __init__(self, shape: Sequence[int], stride: Sequence[int], base: Entry) -> None:
        super().__init__(shape, base.dtype)
        self._stride = tuple(stride)
        self._base = base
        self._whole: Tensor | None = None

    def elements(self, start: int, stop: int) -> Tensor:
        if start >= stop:
            return torch.empty(0, dtype=self.dtype)
        whole = self._gather() if self._whole is None else self._whole
        if stop == self.numel:
            self._release()
        elif self._whole is None:
            self._keep(whole)
        return whole.view(-1)[start:stop]

    def _keep(self, whole: Tensor) -> None:
        if len(self.kept) == _MOST_KEPT:
            self.kept[0]._release()
        self._whole = whole
        self.kept.append(self)

    def _release(self) -> None:
        if self._whole is not None:
            self._whole = None
            self.kept.remove(self)

    def _gather(self) -> Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        order = sorted(range(len(self.shape)), key=lambda dimension: -self._stride[dimension])
        self._fill(whole.permute(order), [self._stride[dimension] for dimension in order], 0)
        return whole

    def _fill(self, target: Tensor, stride: Sequence[int], begin: int) -> None:
        """Read a part of the view that begins at an element of the base; its strides become smaller and smaller."""
        row_span = span(target.shape[1:], stride[1:])
        if row_span > STEP_NUMEL:
            for number, row in enumerate(target):
                self._fill(row, stride[1:], begin + number * stride[0])
            return
        count = (STEP_NUMEL - row_span) // max(1, stride[0]) + 1
        for first in range(0, len(target), count):
            rows = target[first : first + count]
            start = begin + first * stride[0]
            read = self._base.elements(start, start + span(rows.shape, stride))
            rows.copy_(read.as_strided(rows.shape, stride))


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements of the base a view reaches over, from its first to its last."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a tensor: where its first element goes, and its own."""

    offsets: tuple[int, ...]
    entry: Entry


class TiledEntry(Entry):
    """A tensor of one dimension or more in parts of its dtype, cut along any dimension: they cover it all once."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, tiles: Sequence[Tile]) -> None:
        super().__init__(shape, dtype)
        self._tiles = tuple(tiles)

    def elements(self, start: int, stop: int) -> Tensor:
        if start >= stop:
            return torch.empty(0, dtype=self.dtype)
        # By way of all rows that they are in.
        first, last = start // self.row_numel, -(-stop // self.row_numel)
        rows = torch.empty((last - first, *self.shape[1:]), dtype=self.dtype)
        for tile in self._tiles:
            offset, count = tile.offsets[0], tile.entry.shape[0]
            top, bottom = max(first, offset), min(last, offset + count)
            if top < bottom:
                across = [
                    slice(begin, begin + size) for begin, size in zip(tile.offsets, tile.entry.shape, strict=True)
                ]
                rows[(slice(top - first, bottom - first), *across[1:])] = tile.entry.rows(top - offset, bottom - offset)
        return rows.view(-1)[start - first * self.row_numel : stop - first * self.row_numel]
