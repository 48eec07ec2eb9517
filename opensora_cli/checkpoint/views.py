"""Tensors whose elements do not lie one after the other where they are stored."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opensora_cli.checkpoint.entries import Entry

_BLOCK_NUMEL = 2**20
"""How many elements are read at a time."""

_MOST_HELD = 2
"""How many views hold their elements at a time: of each of two checkpoints that are compared, the tensor at hand."""

_holding: list["StridedEntry"] = []
"""These, the oldest first."""


class StridedEntry(Entry):
    """A view of a longer tensor, such as a transposed one or some of its columns.

    Any part of a transposed matrix lies all over the file. So a view is read as a whole, once and in the order of the
    file, and held until its last element was asked for, or other views were read.

    Args:
        shape: its sizes: one dimension or more, and no zero.
        stride: how many elements of `base` lie between neighbours, for each dimension; none is negative.
        base: the tensor of one dimension that it is a view of, from its first element on.
    """

    def __init__(self, shape: Sequence[int], stride: Sequence[int], base: Entry) -> None:
        super().__init__(shape, base.dtype)
        self._stride = tuple(stride)
        self._base = base
        self._held: Tensor | None = None

    def elements(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop`, having read them all."""
        if start >= stop:
            return torch.empty(0, dtype=self.dtype)
        whole = self._gather() if self._held is None else self._held
        if stop == self.numel:
            self._release()
        elif self._held is None:
            self._hold(whole)
        return whole.view(-1)[start:stop]

    def _hold(self, whole: Tensor) -> None:
        if len(_holding) == _MOST_HELD:
            _holding[0]._release()
        self._held = whole
        _holding.append(self)

    def _release(self) -> None:
        if self._held is not None:
            self._held = None
            _holding.remove(self)

    def _gather(self) -> Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        order = sorted(range(len(self.shape)), key=lambda dimension: -self._stride[dimension])
        self._fill(whole.permute(order), [self._stride[dimension] for dimension in order], 0)
        return whole

    def _fill(self, target: Tensor, stride: Sequence[int], begin: int) -> None:
        """Read a part of the view that begins at an element of the base; its strides become smaller and smaller."""
        row_span = span(target.shape[1:], stride[1:])
        if row_span > _BLOCK_NUMEL:
            for number, row in enumerate(target):
                self._fill(row, stride[1:], begin + number * stride[0])
            return
        count = (_BLOCK_NUMEL - row_span) // max(1, stride[0]) + 1
        for first in range(0, len(target), count):
            rows = target[first : first + count]
            start = begin + first * stride[0]
            read = self._base.elements(start, start + span(rows.shape, stride))
            rows.copy_(read.as_strided(rows.shape, stride))


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a tensor: where its first element goes, and its own."""

    offsets: tuple[int, ...]
    entry: Entry


class TiledEntry(Entry):
    """A tensor in parts that were cut along any of its dimensions.

    Args:
        shape: its sizes; one dimension or more.
        dtype: of its elements, and of all tiles.
        tiles: cover it all, without overlap.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, tiles: Sequence[Tile]) -> None:
        super().__init__(shape, dtype)
        self._tiles = tuple(tiles)

    def elements(self, start: int, stop: int) -> Tensor:
        """Put elements `start` to `stop` together, with all rows that they are in."""
        if start >= stop:
            return torch.empty(0, dtype=self.dtype)
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


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie between the first and the last of a view, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements of a view lie one after the other, row by row."""
    step = 1
    for size, given in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and given != step:
            return False
        step *= size
    return True
