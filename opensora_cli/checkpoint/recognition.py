"""Telling what a file is from how it begins: names say little, and are often wrong."""

from enum import Enum
from pathlib import Path

from opensora_cli.checkpoint.archives import MAGIC
from opensora_cli.checkpoint.pickles import PICKLE_MAGIC
from opensora_cli.core.exceptions import CheckpointError

_START_BYTES = 512
_SHOWN_BYTES = 16
_TAR_MAGIC, _TAR_OFFSET = b"ustar", 257
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_WEB_PAGES = (b"<!doctype", b"<html", b"<?xml")


class Kind(Enum):
    """What a file can be to those who look for weights."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    JSON = "JSON"
    LFS_POINTER = "a pointer that Git LFS left in place of the file"
    WEB_PAGE = "a web page that was saved in place of the file"
    TAR = "a tar archive"
    EMPTY = "empty"
    OTHER = "other"


WEIGHTS = (Kind.SAFETENSORS, Kind.TORCH)
"""What holds tensors."""


def recognise(path: Path) -> Kind:
    """Return what a file is.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
    """
    start = read_start(path)
    text = start.lstrip().lower()
    # The length of a safetensors header has a zero in its last byte; no JSON has one.
    if start[7:9] == b"\0{":
        return Kind.SAFETENSORS
    if start.startswith((MAGIC, PICKLE_MAGIC)):
        return Kind.TORCH
    if text.startswith(b"{"):
        return Kind.JSON
    if start.startswith(_LFS_POINTER):
        return Kind.LFS_POINTER
    if text.startswith(_WEB_PAGES):
        return Kind.WEB_PAGE
    if start[_TAR_OFFSET:].startswith(_TAR_MAGIC):
        return Kind.TAR
    return Kind.OTHER if start else Kind.EMPTY


def refusal(path: Path, kind: Kind) -> CheckpointError:
    """Return why a file that holds no tensors cannot be opened, and what to do."""
    if kind is Kind.EMPTY:
        return CheckpointError(f"{path} is empty", hint="fetch it again")
    if kind is Kind.LFS_POINTER:
        return CheckpointError(f"{path} is {kind.value}", hint="run git lfs pull, or fetch it with osora ckpt download")
    if kind is Kind.WEB_PAGE:
        return CheckpointError(f"{path} is {kind.value}", hint="fetch the file itself, logged in where that is needed")
    if kind is Kind.TAR:
        return CheckpointError(
            f"{path} is refused: it is {kind.value}, of a torch so old that reading it could run any code",
            hint="load it where that does no harm, and save it anew",
        )
    return CheckpointError(f"{path} holds no weights: it begins with {read_start(path)[:_SHOWN_BYTES]!r}")


def read_start(path: Path) -> bytes:
    """Read how a file begins.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
        with path.open("rb") as file:
            return file.read(_START_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise CheckpointError(f"{path} cannot be read: {reason or error}") from error
