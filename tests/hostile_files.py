"""Files as an attacker or a broken disk would make them, for the readers of checkpoints and of data."""

import datetime
import decimal
import io
import pickle
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from opensora_cli.core.exceptions import CheckpointError

_MAX_BYTES = 32 * 2**20
_MAX_LINE = 600


def payloads(canary: Path) -> dict[str, bytes]:
    """Return pickles that would all make the file `canary` if anything in them were run."""
    command = f"touch '{canary}'"
    text = _unicode(command)
    code = _unicode(f"open({str(canary)!r}, 'w').close()")
    return {
        "os.system": b"\x80\x02cos\nsystem\n" + text + b"\x85R.",
        "python 2 eval": b"\x80\x02c__builtin__\neval\n" + code + b"\x85R.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + text + b"\x85R.",
        "dotted name": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93" + text + b"\x85R.",
        "instance": b"(" + _unicode(command) + b"ios\nsystem\n.",
        "object": b"(cos\nsystem\n" + text + b"o.",
        "new object": b"\x80\x02csubprocess\nPopen\n" + _unicode("true") + b"\x85\x81.",
        "getattr": b"\x80\x02cbuiltins\ngetattr\nctorch\nserialization\n" + _unicode("os") + b"\x86R.",
        "as state": b"\x80\x02ccollections\nOrderedDict\n)R}"
        + b"X\x09\x00\x00\x00__class__cos\nsystem\n"
        + text
        + b"\x85Rsb.",
        "as a storage": b"\x80\x02" + _unicode("storage") + b"cos\nsystem\n" + text + b"\x85R\x86Q.",
        "torch.hub": b"\x80\x02ctorch.hub\nload_state_dict_from_url\n" + text + b"\x85R.",
        "by reduce": pickle.dumps(_Touch(canary)),
    }


class _Touch:
    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.canary, "w")


def _unicode(text: str) -> bytes:
    content = text.encode()
    return b"X" + len(content).to_bytes(4, "little") + content


def refused(open_it: Callable[[], object]) -> str:
    """Return the one line with which `open_it` refuses a file; anything else fails the test."""
    with pytest.raises(CheckpointError) as caught:
        open_it()
    _check_line(caught.value.message)
    return caught.value.message


@contextmanager
def little_memory(most: int = _MAX_BYTES) -> Iterator[None]:
    """Fail the test if Python takes more memory in the block than any small file is worth."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most


def _check_line(message: str) -> None:
    assert message.isprintable()
    assert len(message) < _MAX_LINE


DEEP_JSON = {
    "arrays": b"[" * 100_000 + b"]" * 100_000,
    "objects": b'{"text":' * 50_000 + b"1" + b"}" * 50_000,
    "never closed": b"[" * 100_000,
}
"""JSON that Python's parser gives up on, at its limit of recursion."""

NO_OBJECTS = [*DEEP_JSON.values(), b"[]", b'"text"', b"null", b"1", b"{", b"9" * 10_000, b"", b"NaN"]
"""What is there in place of a JSON object."""


def change_of_file(**fields: object) -> Callable[[dict[str, Any]], None]:
    """Return what changes the description of the files in an answer of the Hub."""
    return lambda document: [sibling.update(fields) for sibling in document["siblings"]].clear()


def change_of_repo(**fields: object) -> Callable[[dict[str, Any]], None]:
    """Return what changes an answer of the Hub."""
    return lambda document: document.update(fields)


HUB_ANSWERS: dict[str, Callable[[dict[str, Any]], None]] = {
    **{f"name {value!r}": change_of_file(rfilename=value) for value in (None, 3, [], {})},
    **{f"size {value!r}": change_of_file(size=value) for value in (-1, "a", [], 1.5, True)},
    **{f"large {value!r}": change_of_file(lfs=value) for value in ("x", {"sha256": "z"}, {"sha256": 3, "size": 1})},
    "hash 3": change_of_file(lfs=None, blobId=3),
    **{f"commit {value!r:.20}": change_of_repo(sha=value) for value in (3, "../x", "a\0b", "x" * 100_000, "\ud800")},
    **{f"files {value!r}": change_of_repo(siblings=value) for value in (None, 3, {}, "x", [None], [3], [[]])},
    **{f"card {value!r}": change_of_repo(cardData=value) for value in (3, "x", [1])},
}
"""What is done to the Hub's information on a repository that makes it unusable."""

CAPTIONS: dict[str, tuple[str, bytes, str]] = {
    **{f"deep {name}": (".json", content, "nested too deeply") for name, content in DEEP_JSON.items()},
    "half a character": (".json", rb'{"text": "cut off \ud83d"}', "half a character"),
    "zero byte in JSON": (".json", rb'{"text": "a\u0000b"}', "zero byte"),
    "no JSON": (".json", b"{text: 1}", "is not JSON"),
    "number of many digits": (".json", b"9" * 10_000, "is not JSON"),
    "list": (".json", b'["text"]', "has no text under"),
    "null": (".json", b"null", "has no text under"),
    "text of another type": (".json", b'{"text": ["a"], "caption": 3, "prompt": null}', "has no text under"),
    "JSON of zero bytes": (".json", b"", "is not JSON"),
    "JSON in Latin-1": (".json", b'{"text": "\xe9t\xe9"}', "is not text in UTF-8"),
    "huge JSON": (".json", b'"' + b"word " * 400_000 + b'"', "too many for what it should be"),
    "Latin-1": (".txt", b"un \xe9t\xe9", "is not text in UTF-8"),
    "UTF-16": (".txt", "text".encode("utf-16"), "is not text in UTF-8"),
    "UTF-16 without a mark": (".txt", "text".encode("utf-16-le"), "zero byte"),
    "huge": (".txt", b"word " * 400_000, "too many for what it should be"),
}
"""Files of captions: their ending, their content, and what the reason says why none can be used."""


def parquet_tables(columns: dict[str, list[Any]]) -> dict[str, bytes]:
    """Return parquet files that no reader gets the columns of clips from; `columns` are those of a sound table."""
    import pyarrow  # type: ignore[import-untyped]  # it ships none
    from pyarrow import parquet

    rows = len(columns["path"])

    def stored(table: Any) -> bytes:
        stream = io.BytesIO()
        parquet.write_table(table, stream)
        return stream.getvalue()

    def changed(name: str, cells: Any) -> bytes:
        return stored(pyarrow.table({**columns, name: cells}))

    sound = pyarrow.table(columns)
    whole = stored(sound)
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    offsets = b"".join(index.to_bytes(4, "little") for index in range(rows + 1))
    no_utf8 = pyarrow.StringArray.from_buffers(rows, pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"\xff" * rows))
    return {
        **{f"cut at {tenth} tenths": whole[: len(whole) * tenth // 10] for tenth in range(10)},
        "damaged pages": whole[:4] + b"\xff" * (len(whole) - footer - 4) + whole[-footer:],
        "damaged footer": whole[:-footer] + b"\xff" * (footer - 8) + whole[-8:],
        "no columns": stored(pyarrow.table({})),
        "other columns": stored(pyarrow.table({"a": [1]})),
        "a column twice": stored(sound.append_column("height", sound.column("height"))),
        "text that is no UTF-8": changed("text", no_utf8),
        "dates that Python has not": changed("text", pyarrow.array([2**62] * rows, pyarrow.timestamp("us"))),
    }


def parquet_cells(rows: int) -> dict[str, tuple[str, list[Any]]]:
    """Return cells of wrong types, by what they are: the name of their column, and one for each row."""
    return {
        "sizes as text": ("height", ["tall"] * rows),
        "sizes as lists": ("height", [[64]] * rows),
        "sizes as structures": ("height", [{"a": 1}] * rows),
        "sizes as dates": ("height", [datetime.datetime(2026, 1, 1)] * rows),
        "sizes that are too large": ("height", [decimal.Decimal("9" * 38)] * rows),
        "sizes that are no numbers": ("height", [float("nan")] * rows),
        "sizes that are missing": ("height", [None] * rows),
        "paths that are missing": ("path", [None] * rows),
        "paths as lists": ("path", [["a.mp4"]] * rows),
        "captions as structures": ("text", [{"short": "a boat"}] * rows),
    }


def cut_in_tenths(whole: bytes) -> list[bytes]:
    """Return what is left of a file whose writing or copying ended early: none of it, one tenth of it, and so on."""
    return [whole[: len(whole) * tenth // 10] for tenth in range(10)]


def animated_gif() -> bytes:
    """Return a GIF of four frames, whose reader stumbles over an end inside of a block."""
    levels = np.random.default_rng(0).integers(256, size=(40, 48, 3), dtype=np.uint8)
    frames = [Image.fromarray(np.roll(levels, 5 * index, 0)) for index in range(4)]
    stream = io.BytesIO()
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:], duration=50)
    return stream.getvalue()


def picture_bombs() -> dict[str, bytes]:
    """Return small files of pictures that say they are gigantic, or have no size."""
    text = _png_chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(50_000_000)))
    return {
        "large.png": _png(2**31 - 1, 2**31 - 1),
        "wide.png": _png(2**31 - 1, 1),
        "none.png": _png(0, 0),
        "text.png": _png(8, 8, before=text),
        "large.gif": b"GIF89a" + b"\xff" * 4 + bytes(3) + b"," + bytes(4) + b"\xff" * 4 + b"\0\2\2D\1\0;",
        "large.bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, 60000, 60000, 1, 24, *[0] * 6),
        "large.ppm": b"P6 60000 60000 255\n" + bytes(10),
        "large.webp": b"RIFF" + struct.pack("<I", 30) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff" * 6,
    }


def _png(width: int, height: int, *, before: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = _png_chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + _png_chunk(b"IHDR", header) + before + data + _png_chunk(b"IEND", b"")


def _png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
