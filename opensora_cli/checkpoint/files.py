"""Files and folders of weights: reading, hashes, and checks of the place where they are written. Needs no torch."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from opensora_cli.core import reading as core_reading
from opensora_cli.core.choices import Format
from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.core.files import nearest_existing, refuse_special, require_space, writing

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


def check_target(path: Path, *, format: Format, overwrite: bool, sources: Iterable[Path] = (), needed: int = 0) -> None:
    """Check, before hours of work, that `write_checkpoint` can write tensors of `needed` bytes.

    Raises:
        RequestError: `path` is one of the `sources`, inside of one, or around one.
        OutputError: `path` exists already, or lies in a folder without write permission, or its disk is too small.
            `overwrite` allows a file, but no folder.
    """
    with writing(path):
        here = Path(os.path.realpath(path))
        for source in sources:
            there = Path(os.path.realpath(source))
            if here == there or (path.exists() and path.samefile(source)):
                raise RequestError(f"{path} is also the source", hint="write to another name")
            if there in here.parents or here in there.parents:
                raise RequestError(f"{path} and the source {source} overlap", hint="write to another folder")
        if os.path.lexists(path):
            _check_existing(path, format=format, overwrite=overwrite)
        place = nearest_existing(path.absolute().parent)
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            problem = f"nothing may be written to {place}" if place.is_dir() else f"{place} is not a folder"
            raise OutputError(f"cannot write {path}: {problem}", hint="choose another folder")
        require_space(path, needed)


def _check_existing(path: Path, *, format: Format, overwrite: bool) -> None:
    refuse_special(path)
    if path.is_dir() and not format.is_folder:
        raise OutputError(f"{path} is a folder", hint="give the name of a file, or a format of several files")
    if format.is_folder and not path.is_dir():
        raise OutputError(f"{path} is a file", hint="give the name of a folder, or a format of one file")
    if format.is_folder and (path.is_symlink() or any(path.iterdir())):
        raise OutputError(f"{path} exists already", hint="remove the folder, or write to another name")
    if not format.is_folder and not overwrite:
        raise OutputError(f"{path} exists already", hint="use --overwrite, or write to another name")


def _blobs_of(folder: Path) -> Path | None:
    """Return the blobs folder of the Hugging Face cache, if `folder` is a snapshot or part of one."""
    for each in (folder, *folder.parents):
        if each.parent.name == "snapshots":
            return each.parent.parent / "blobs"
    return None
