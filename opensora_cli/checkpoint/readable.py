"""Reading the files and folders of weights. Needs no torch."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from opensora_cli.core import reading as core_reading
from opensora_cli.core.exceptions import CheckpointError

reading = partial(core_reading.reading, problem=CheckpointError)
"""`core.reading` for checkpoint files: a CheckpointError names the file that cannot be read."""

require_file = partial(core_reading.require_file, problem=CheckpointError)
"""`core.reading.require_file` for a checkpoint file."""


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """Read a file that must exist, with the errors of `reading`."""
    require_file(path)
    with reading(path):
        yield


def visible_files(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted, without hidden files. Unfinished files are hidden."""
    with reading(folder):
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def refuse_outside(path: Path, folder: Path) -> Path:
    """Return `path` if it lies in `folder` after all links are followed.

    The files of a snapshot in the Hugging Face cache are links to the blobs beside it; these are allowed. Raises
    CheckpointError if the path lies elsewhere.
    """
    real, real_folder = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if real.is_relative_to(real_folder) or real.parent == _blobs_of(real_folder):
        return path
    raise CheckpointError(f"{path} is a link out of its folder", hint="put the file itself there")


def is_sha256(text: object) -> bool:
    """Return whether a value is a SHA-256 in lowercase hexadecimal digits."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{64}", text) is not None


def sha256_of(path: Path, *, advance: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a regular file in hexadecimal digits. Raises CheckpointError if it cannot be read."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(2**20))
    with reading_file(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if advance is not None:
                advance(count)
    return digest.hexdigest()


def listing_sha256(hashes: Mapping[str, str]) -> str:
    """Return the SHA-256 of the lines that `sha256sum` prints for files, from their names and hashes."""
    lines = (f"{digest}  {name}\n" for name, digest in hashes.items())
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _blobs_of(folder: Path) -> Path | None:
    """Return the blobs folder of the Hugging Face cache, if `folder` is a snapshot or part of one."""
    for each in (folder, *folder.parents):
        if each.parent.name == "snapshots":
            return each.parent.parent / "blobs"
    return None
