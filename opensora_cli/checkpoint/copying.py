"""Putting tensors into files at the speed of the disk.

Plain reads and writes of one megabyte, in one thread: the system reads ahead and writes behind by itself, the buffer
stays in the processor's cache, and so it takes half the processor time of `copy_file_range`, which goes page by page
where file systems cannot share blocks. The tensors of a checkpoint hardly ever begin where they could.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from itertools import chain, groupby

from torch import Tensor, uint8

from opensora_cli.checkpoint.entries import PIECE_BYTES, Entry, Extent, read_extent


def copy_entries(entries: Iterable[Entry], file: FileIO, *, advance: Callable[[int], None] | None = None) -> None:
    """Write the bytes of tensors one after the other: row by row, little-endian, without gaps.

    Tensors that lie one behind the other in a file are copied in one run, however small each is; others are computed
    piece by piece.

    Args:
        entries: what to write.
        file: open for writing, without a buffer (`buffering=0`); they go to its position, which moves behind them.
        advance: called with the number of bytes that were written, again and again.

    Raises:
        CheckpointError: a file that holds them cannot be read, or has become shorter.
        OSError: `file` cannot be written.
    """
    tell = advance or _ignore
    for stored, group in groupby(entries, key=lambda entry: entry.extents() is not None):
        if stored:
            for run in merged(chain.from_iterable(entry.extents() or () for entry in group)):
                _copy_run(run, file, tell)
        else:
            for piece in chain.from_iterable(entry.pieces() for entry in group):
                write_all(file, _bytes_of(piece))
                tell(piece.nbytes)


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


def _bytes_of(piece: Tensor) -> memoryview:
    return piece.contiguous().view(uint8).numpy().data


def _ignore(_: int) -> None:
    """Drop the progress."""
