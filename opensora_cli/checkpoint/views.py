"""Tensors whose elements do not lie one after the other where they are stored."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opensora_cli.checkpoint.entries import Entry


class StridedEntry(Entry):
    """A view of a longer tensor, such as a transposed one or some of its columns.

    What is read at a time is what lies between the first and the last element asked for: of a transposed matrix, all.

    Args:
        shape: its sizes: one dimension or more, and no zero.
        stride: how many elements of `base` lie between neighbours, for each dimension; none is negative.
        base: the tensor of one dimension that it is a view of, from its first element on.
    """

    def __init__(self, shape: Sequence[int], stride: Sequence[int], base: Entry) -> None:
        super().__init__(shape, base.dtype)
        self._stride = tuple(stride)
        self._base = base

    def elements(self, start: int, stop: int) -> Tensor:
        """Read elements `start` to `stop`, out of all rows that they are in."""
        first, last = start // self.row_numel, -(-stop // self.row_numel)
        if first >= last:
            return torch.empty(0, dtype=self.dtype)
        shape = (last - first, *self.shape[1:])
        begin = first * self._stride[0]
        read = self._base.elements(begin, begin + span(shape, self._stride))
        rows = read.as_strided(shape, self._stride).reshape(-1)
        return rows[start - first * self.row_numel : stop - first * self.row_numel]


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
