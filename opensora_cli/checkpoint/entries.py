"""Tensors that have not been read yet: what a checkpoint holds, and what conversions make of it.

An entry knows its shape and dtype, and reads any range of its elements when asked. Conversions wrap entries into other
entries; writing asks for one small range after the other. So nothing ever holds a checkpoint, nor even a whole tensor.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.listing import plain

PIECE_BYTES = 2**20
"""How much is read at a time: large enough for a disk, small enough to stay in a processor's cache."""


MAX_DIMENSIONS = 64
"""Of a tensor: torch computes with no more."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes of a file."""

    path: Path
    offset: int
    length: int

    def part(self, start: int, stop: int) -> "Extent":
        """Return bytes `start` to `stop` of it."""
        return Extent(self.path, self.offset + start, stop - start)


class Entry(ABC):
    """A tensor in waiting.

    Args:
        shape: its sizes; empty for a scalar.
        dtype: of its elements.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def row_numel(self) -> int:
        """How many elements one of its rows (along the first dimension) has; a scalar is one row."""
        return prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.numel * self.dtype.itemsize

    @abstractmethod
    def elements(self, start: int, stop: int) -> Tensor:
        """Read elements `start` to `stop`, counted row by row, as a tensor of one dimension on the CPU.

        Raises:
            CheckpointError: a file cannot be read, or has become shorter.
        """

    def extents(self) -> tuple[Extent, ...] | None:
        """Return the runs of bytes that this tensor is, one after the other; None if it has to be computed."""
        return None

    def rows(self, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop`: (stop - start, ...)."""
        return self.elements(start * self.row_numel, stop * self.row_numel).view(stop - start, *self.shape[1:])

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[Tensor]:
        """Read it all, one range of at most `piece_bytes` after the other; an empty tensor has none."""
        step = max(1, piece_bytes // self.dtype.itemsize)
        for start in range(0, self.numel, step):
            yield self.elements(start, min(start + step, self.numel))

    def read(self) -> Tensor:
        """Read it as a whole."""
        return self.elements(0, self.numel).view(self.shape)


class StoredEntry(Entry):
    """A tensor whose bytes lie in files as they are: row by row, little-endian.

    Args:
        shape: its sizes.
        dtype: of its elements.
        extents: where; together as long as the tensor, each a whole number of elements.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, extents: Sequence[Extent]) -> None:
        super().__init__(shape, dtype)
        self._extents = tuple(extents)
        if sum(extent.length for extent in extents) != self.nbytes:
            raise ValueError(f"{self.nbytes} bytes of a tensor in extents of {[e.length for e in extents]}")

    def extents(self) -> tuple[Extent, ...] | None:
        """Return where it lies."""
        return self._extents

    def elements(self, start: int, stop: int) -> Tensor:
        """Read elements `start` to `stop`."""
        size = self.dtype.itemsize
        wanted = cut_extents(self._extents, start * size, stop * size)
        buffer = torch.empty((stop - start) * size, dtype=torch.uint8)
        view = buffer.numpy().data
        for extent in wanted:
            read_extent(extent, view[: extent.length])
            view = view[extent.length :]
        return buffer.view(self.dtype)


class HeldEntry(Entry):
    """A tensor that is in memory already.

    Args:
        tensor: on any device; it is detached, and read as it is at the time of reading.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor.detach()

    def elements(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop`."""
        if self._tensor.is_contiguous() or self._tensor.ndim < 2:
            return self._tensor.reshape(-1)[start:stop].cpu()
        # Flattening copies what is not contiguous: only the rows that are needed.
        first, last = start // self.row_numel, -(-stop // self.row_numel)
        skipped = first * self.row_numel
        return self._tensor[first:last].reshape(-1)[start - skipped : stop - skipped].cpu()


class CastEntry(Entry):
    """Another entry in another dtype, rounded element by element as torch does.

    Args:
        base: the other entry.
        dtype: what it is rounded to.
        name: of the tensor, for errors.
    """

    def __init__(self, base: Entry, dtype: torch.dtype, *, name: str) -> None:
        super().__init__(base.shape, dtype)
        self._base = base
        self._name = name

    def elements(self, start: int, stop: int) -> Tensor:
        """Read and round elements `start` to `stop`.

        Raises:
            CheckpointError: a number is too large for the dtype; or as for any entry.
        """
        return rounded(self._base.elements(start, stop), self.dtype, name=self._name)


class RowsEntry(Entry):
    """Some consecutive rows of another entry.

    Args:
        base: of one dimension or more.
        start, stop: the rows.
    """

    def __init__(self, base: Entry, start: int, stop: int) -> None:
        super().__init__((stop - start, *base.shape[1:]), base.dtype)
        self._base = base
        self._first = start * base.row_numel

    def extents(self) -> tuple[Extent, ...] | None:
        """Return where these rows lie."""
        extents = self._base.extents()
        if extents is None:
            return None
        start = self._first * self.dtype.itemsize
        return tuple(cut_extents(extents, start, start + self.nbytes))

    def elements(self, start: int, stop: int) -> Tensor:
        """Read elements `start` to `stop` of these rows."""
        return self._base.elements(self._first + start, self._first + stop)


class JoinedEntry(Entry):
    """The rows of several entries, one after the other.

    Args:
        parts: of the same dtype, and of the same shape but for the number of rows.
    """

    def __init__(self, parts: Sequence[Entry]) -> None:
        kinds = {(part.dtype, part.shape[1:]) for part in parts}
        if len(kinds) != 1:
            raise ValueError(f"rows of different kinds cannot be joined: {sorted(map(str, kinds))}")
        super().__init__((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), parts[0].dtype)
        self._parts = tuple(parts)
        self._ends = list(accumulate(part.numel for part in parts))

    def extents(self) -> tuple[Extent, ...] | None:
        """Return where the parts lie."""
        runs: list[Extent] = []
        for part in self._parts:
            extents = part.extents()
            if extents is None:
                return None
            runs += extents
        return tuple(runs)

    def elements(self, start: int, stop: int) -> Tensor:
        """Read elements `start` to `stop` out of the parts that hold them."""
        read = []
        index = bisect_right(self._ends, start)
        while start < stop:
            part, end = self._parts[index], min(stop, self._ends[index])
            first = self._ends[index] - part.numel
            read.append(part.elements(start - first, end - first))
            start, index = end, index + 1
        return read[0] if len(read) == 1 else torch.cat([*read, torch.empty(0, dtype=self.dtype)])


def rounded(values: Tensor, dtype: torch.dtype, *, name: str) -> Tensor:
    """Return numbers in another dtype.

    Args:
        values: of one dimension.
        dtype: theirs from now on.
        name: of the tensor they are of, for errors.

    Raises:
        CheckpointError: finite numbers would become infinite.
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


def cut_extents(extents: Sequence[Extent], start: int, stop: int) -> Iterator[Extent]:
    """Yield the parts of `extents` that hold bytes `start` to `stop` of them all."""
    position = 0
    for extent in extents:
        first, last = max(start, position), min(stop, position + extent.length)
        if first < last:
            yield extent.part(first - position, last - position)
        position += extent.length


def read_extent(extent: Extent, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes of `extent`.

    Raises:
        CheckpointError: the file cannot be read, or ends before.
    """
    try:
        with extent.path.open("rb", buffering=0) as file:
            file.seek(extent.offset)
            filled = 0
            while filled < extent.length:
                count = file.readinto(buffer[filled : extent.length])
                if not count:
                    raise CheckpointError(f"{extent.path} has become shorter while it was read")
                filled += count
    except OSError as error:
        raise CheckpointError(f"{extent.path} cannot be read: {error.strerror or error}") from error
