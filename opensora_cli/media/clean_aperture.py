"""Clean aperture of MP4 and QuickTime tracks: the part of each frame that players show (ISO/IEC 14496-12, `clap`).

FFmpeg reads it, but PyAV has no name for it.
"""

import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

_LONGEST_BYTES = 64 * 2**20
"""Limit of the box `moov`, which describes all tracks."""
_SAMPLE_ENTRY_BYTES = 78
"""Fixed fields of a picture track's entry in `stsd`, before its boxes."""


def read_clean_aperture(path: Path, *, track_id: int, width: int, height: int) -> tuple[slice, slice]:
    """Return the rows and columns that players show, out of frames of (height, width).

    All of them if the file has no clean aperture, or one that is not within the frame.
    """
    everything = slice(0, height), slice(0, width)
    try:
        values = _stored_aperture(path, track_id)
        if values is None:
            return everything
        shown_width, shown_height, right, down = (
            Fraction(values[2 * index], values[2 * index + 1]) for index in range(4)
        )
    except (struct.error, ZeroDivisionError):
        return everything
    # The offsets are those of its center from the frame's center.
    left = round((width - shown_width) / 2 + right)
    top = round((height - shown_height) / 2 + down)
    rows, columns = slice(top, top + round(shown_height)), slice(left, left + round(shown_width))
    fits = 0 <= top < rows.stop <= height and 0 <= left < columns.stop <= width
    return (rows, columns) if fits else everything


def _stored_aperture(path: Path, track_id: int) -> tuple[int, ...] | None:
    """Return numerators and denominators of width, height and both offsets."""
    for track in _children(_movie_box(path), b"trak"):
        header = next(_children(track, b"tkhd"), b"")
        id_at = 20 if header[:1] == b"\1" else 12
        if struct.unpack_from(">I", header, id_at)[0] != track_id:
            continue
        box = track
        for name in (b"mdia", b"minf", b"stbl", b"stsd"):
            box = next(_children(box, name), b"")
        size = struct.unpack_from(">I", box, 8)[0]
        aperture = next(_children(box[16 + _SAMPLE_ENTRY_BYTES : 8 + size], b"clap"), None)
        return None if aperture is None else struct.unpack_from(">8i", aperture)
    return None


def _movie_box(path: Path) -> bytes:
    """Return the content of the box `moov`; nothing for other kinds of files."""
    with path.open("rb") as stream:
        while len(start := stream.read(8)) == 8:
            size, name = struct.unpack(">I4s", start)
            header = 8
            if size == 1:
                size, header = struct.unpack(">Q", stream.read(8))[0], 16
            if name == b"moov":
                return stream.read(size - header) if header <= size <= _LONGEST_BYTES else b""
            if size < header or not name.isalnum():
                return b""
            stream.seek(size - header, 1)
    return b""


def _children(content: bytes, name: bytes) -> Iterator[bytes]:
    """Yield the contents of the boxes called `name`."""
    at = 0
    while at + 8 <= len(content):
        size, found = struct.unpack_from(">I4s", content, at)
        if size < 8:
            return
        if found == name:
            yield content[at + 8 : at + size]
        at += size
