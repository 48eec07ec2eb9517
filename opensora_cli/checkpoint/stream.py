"""Lazily read tensors: what a checkpoint holds, and what conversions make of it.

An entry has a shape and a dtype, and reads any range of its elements on request. Conversions wrap entries into other
entries; writing reads one small range after the other. So no checkpoint, nor even a whole tensor, is in memory.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import chain, groupby
from math import prod
from pathlib import Path

import torch
from torch import Tensor, uint8

from opensora_cli.checkpoint.readable import reading
from opensora_cli.core.exceptions import CheckpointError

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
    """A lazily read tensor."""

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

    The lengths of `extents` sum to that of the tensor, each a whole number of elements.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, extents: Sequence[Extent]) -> None:
        super().__init__(shape, dtype)
        self._extents = tuple(extents)
        if sum(extent.length for extent in extents) != self.nbytes:
            raise ValueError(f"{self.nbytes} bytes of a tensor in extents of {[e.length for e in extents]}")

    def extents(self) -> tuple[Extent, ...] | None:
        return self._extents

    def elements(self, start: int, stop: int) -> Tensor:
        size = self.dtype.itemsize
        wanted = cut_extents(self._extents, start * size, stop * size)
        buffer = torch.empty((stop - start) * size, dtype=torch.uint8)
        view = buffer.numpy().data
        for extent in wanted:
            read_extent(extent, view[: extent.length])
            view = view[extent.length :]
        return buffer.view(self.dtype)


class HeldEntry(Entry):
    """A tensor that is in memory already, on any device; it is read as it is at the time of reading."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor.detach()

    def elements(self, start: int, stop: int) -> Tensor:
        if self._tensor.is_contiguous() or self._tensor.ndim < 2:
            return self._tensor.reshape(-1)[start:stop].cpu()
        # Flattening copies what is not contiguous: only the rows that are needed.
        first, last = start // self.row_numel, -(-stop // self.row_numel)
        skipped = first * self.row_numel
        return self._tensor[first:last].reshape(-1)[start - skipped : stop - skipped].cpu()


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
    with reading(extent.path), extent.path.open("rb", buffering=0) as file:
        file.seek(extent.offset)
        filled = 0
        while filled < extent.length:
            count = file.readinto(buffer[filled : extent.length])
            if not count:
                raise CheckpointError(f"{extent.path} has become shorter while it was read")
            filled += count


def copy_entries(entries: Iterable[Entry], file: FileIO, *, advance: Callable[[int], None] | None = None) -> None:
    """Write the bytes of tensors one after the other: row by row, little-endian, without gaps.

    Tensors that lie one behind the other in a file are copied in one run, however small each is; others are computed
    piece by piece.

    Args:
        entries: the tensors.
        file: open for writing, without a buffer (`buffering=0`); they go to its position, which moves behind them.
        advance: called with the bytes written by each step.

    Raises:
        CheckpointError: a file that holds them cannot be read, or has become shorter.
        OSError: `file` cannot be written.
    """
    progress = advance or (lambda _: None)
    for stored, group in groupby(entries, key=lambda entry: entry.extents() is not None):
        if stored:
            for run in merged(chain.from_iterable(entry.extents() or () for entry in group)):
                _copy_run(run, file, progress)
        else:
            for data in byte_pieces(group, progress):
                write_all(file, data)


def byte_pieces(entries: Iterable[Entry], advance: Callable[[int], None] | None = None) -> Iterator[memoryview]:
    """Yield the bytes of tensors piece by piece; `advance` is called with the size of each one that was used."""
    for piece in chain.from_iterable(entry.pieces() for entry in entries):
        yield piece.contiguous().view(uint8).numpy().data
        if advance is not None:
            advance(piece.nbytes)


def merged(extents: Iterable[Extent]) -> Iterator[Extent]:
    """Yield the same bytes in the same order, in as few extents as possible; empty ones are left out."""
    last: Extent | None = None
    for extent in extents:
        if not extent.length:
            continue
        if last is not None and last.path == extent.path and last.offset + last.length == extent.offset:
            last = Extent(last.path, last.offset, last.length + extent.length)
            continue
        if last is not None:
            yield last
        last = extent
    if last is not None:
        yield last


def write_all(file: FileIO, content: bytes | bytearray | memoryview) -> None:
    """Write all of `content` at the position of an unbuffered file, in as many calls as the system wants."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file.fileno(), rest) :]


def _copy_run(run: Extent, file: FileIO, advance: Callable[[int], None]) -> None:
    buffer = memoryview(bytearray(min(PIECE_BYTES, run.length)))
    for start in range(0, run.length, PIECE_BYTES):
        part = run.part(start, min(start + PIECE_BYTES, run.length))
        read_extent(part, buffer)
        write_all(file, buffer[: part.length])
        advance(part.length)
