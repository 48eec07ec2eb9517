"""Writing files so that a crash leaves the old file or the new one, never half of one."""

import ctypes
import errno
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from opensora_cli.core.exceptions import OsoraWarning, OutputError
from opensora_cli.core.folder_lock import remove_left
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.left_overs import temporary_name
from opensora_cli.core.reading import reading

_MAKE_ROOM = "make room there, or write to another disk"
_ANOTHER_NAME = "write to another name"
_ANOTHER_PLACE = "choose another name, or another folder"

# For indexes, folders and whatever else a file system keeps beside the data.
_HEADROOM = 2**20

_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems on which a folder cannot be flushed."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on leaving, the file or folder that was written there becomes `path`.

    Missing parent folders are made. What was written is flushed to the disk before it is renamed, and removed when
    the block fails or is interrupted, so `path` never holds half a result. The temporary name has another extension: a
    writer that guesses its format from the name needs the format as an argument. Without `replace`, what is there, or
    appears there meanwhile, is kept, unless it is an empty folder and a folder was written. See `take_name`.

    Raises:
        OutputError: an operating system error while making, writing (in the block, too), flushing or renaming, with
            `path` and the cause; or `path` is a device or such; or it is there and must not be replaced.
    """
    target = Path(path)
    with temporary_beside(target) as temporary:
        yield temporary
        flush(temporary)
        take_name(temporary, target, replace=replace)


@contextmanager
def atomic_folder(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[Path]:
    """Yield a new temporary folder beside `path`; on leaving, it becomes `path` with everything in it.
    All else, and what it raises, is as in `atomic_path`.
    """
    with atomic_path(path, replace=replace) as temporary:
        temporary.mkdir()
        yield temporary


@contextmanager
def temporary_beside(target: Path) -> Iterator[Path]:
    """Yield an unused name beside `target`, whose folder is made, and at the end remove what is there.

    What cannot be removed stays for the next run, see `remove_left`.
    Raises OutputError for an operating system error in the block, with `target`, or if that is a device or such.
    """
    with writing(target):
        refuse_special(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_left(target.parent)
        temporary = target.parent / temporary_name()
        try:
            yield temporary
        finally:
            with suppress(OSError):
                remove(temporary)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Raise operating system errors of the block as OutputError that names `target`."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}", hint=_hint(error)) from error


def take_name(temporary: Path, target: Path, *, replace: bool, swap: bool = False) -> None:
    """Let a file or folder that is on the disk have the name `target` beside it.

    With `swap`, a file that is replaced has the name `temporary` afterwards, where the file system can swap names.

    A folder that is already there is replaced as a whole: on Linux, where the file system can, the two swap names
    in one step, and the caller removes the old one. Elsewhere the old one is renamed first, and a crash in that instant
    leaves it under the name `.osora-*.old`, which no run removes. A link to a folder is replaced by a folder of its
    own; what it points to stays. Where the folder of both cannot be flushed to the disk, that is a warning.
    Raises OSError, or OutputError where `target` is there and must not be replaced.
    """
    is_folder = temporary.is_dir()
    if replace and is_folder and target.is_dir():
        _swap_names(temporary, target)
    elif replace:
        # Unlike renaming, swapping would put a file in the place of a folder.
        if not swap or target.is_dir() or not _swap_in_one_step(temporary, target):
            temporary.replace(target)
    else:
        with _no_replacing(target):
            # The system renames a folder over nothing but an empty one.
            temporary.rename(target) if is_folder else _link_or_rename(temporary, target)
    try:
        _flush_to_disk(target.parent)
    except OSError as error:
        warnings.warn(
            f"{target} is written, but a power failure may lose it: its folder cannot be flushed to the disk: "
            f"{error.strerror or error}",
            OsoraWarning,
            stacklevel=2,
        )


def flush(written: Path) -> None:
    """Have the disk keep a file, or a folder and all that is in it. Raises OSError."""
    for path in [*(sorted(written.rglob("*")) if written.is_dir() else []), written]:
        _flush_to_disk(path)


def remove(temporary: Path) -> None:
    """Remove a file, a link or a folder with all that is in it, if it is there. Raises OSError."""
    if temporary.is_dir() and not temporary.is_symlink():
        shutil.rmtree(temporary)
    else:
        temporary.unlink(missing_ok=True)


def replace_folder(temporary: Path, target: Path) -> None:
    """Let a folder whose files are on the disk take the name of another beside it, which goes away if it is there.
    Raises OSError if that is not possible.
    """
    for folder in [*sorted(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
        _flush_to_disk(folder)
    take_name(temporary, target, replace=True)
    shutil.rmtree(temporary, ignore_errors=True)


def write_bytes_atomic(path: str | os.PathLike[str], content: bytes, *, replace: bool = True) -> None:
    """Make `content` the whole of `path`, through `atomic_path`. Raises OutputError as `atomic_path`."""
    with atomic_path(path, replace=replace) as temporary, open(temporary, "xb") as file:
        file.write(content)


def write_json_atomic(path: str | os.PathLike[str], document: object) -> None:
    """Make `document` the whole of `path`, through `atomic_path`. Raises as `atomic_path` and `json_bytes`."""
    write_bytes_atomic(path, json_bytes(document))


def json_bytes(document: object) -> bytes:
    """Return `document` as indented UTF-8 JSON.

    NaN and infinity are refused, since no other JSON reader takes them.
    Raises ValueError or TypeError if `document` is not JSON.
    """
    text = json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False)
    # A shell argument that is not UTF-8 reaches Python as lone surrogates; the backslash form is their JSON escape.
    return (text + "\n").encode("utf-8", "backslashreplace")


def require_there(*paths: str) -> None:
    """Raise FileProblem if a file or folder is not there, or is denied: for commands, before they import what reads
    it.
    """
    for path in paths:
        with reading(path):
            os.stat(path)


def user_cache(kind: str) -> Path | None:
    """Return the folder of the user's cache for one kind of thing, which may not exist; None: they have none."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "osora" / kind
    except RuntimeError:
        return None


def refuse_special(path: Path) -> None:
    """Refuse a device, a pipe or a socket as the place of a result: renaming would replace it.
    Raises OutputError if `path` is one.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OutputError(f"{path} is neither a file nor a folder", hint=_ANOTHER_NAME)


def nearest_existing(path: Path) -> Path:
    """Return `path` or the nearest folder above it that exists: a new file would have its disk and permissions."""
    return next((place for place in (path, *path.absolute().parents) if place.exists()), Path("/"))


def require_writable(path: Path, *, overwrite: bool) -> None:
    """Check that a file can be written at `path`, before the work for it begins.
    Raises OutputError if it is a folder or a device, exists and is not to be replaced, its folder is read-only, or it
    cannot be looked at.
    """
    try:
        refuse_special(path)
        if path.is_dir():
            raise OutputError(f"{path} is a folder", hint="name a file in it")
        if os.path.lexists(path) and not overwrite:
            raise OutputError(f"{path} exists already", hint="use --overwrite to replace it, or another name")
        folder = nearest_existing(path.absolute().parent)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}", hint=_hint(error) or _ANOTHER_PLACE
        ) from error
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OutputError(f"cannot write in {folder}", hint=_ANOTHER_PLACE)


def require_space(path: Path, needed: int) -> None:
    """Check that the disk of `path`, which need not exist, has room for `needed` bytes more.
    Raises OutputError if it has not.
    """
    try:
        usage = shutil.disk_usage(nearest_existing(path))
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    # Some network file systems do not report their size.
    if usage.total and usage.free < needed + _HEADROOM:
        raise OutputError(
            f"{path} needs {format_bytes(needed)}, and its disk has {format_bytes(usage.free)} free", hint=_MAKE_ROOM
        )


@contextmanager
def _no_replacing(target: Path) -> Iterator[None]:
    """Translate the error of a rename or link onto an existing name."""
    try:
        yield
    except OSError as error:
        if not os.path.lexists(target):
            raise
        raise OutputError(f"{target} exists already", hint=_ANOTHER_NAME) from error


def _link_or_rename(temporary: Path, target: Path) -> None:
    """Give a file a name that is free: unlike renaming, linking never replaces what is there."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(target):
            raise
        temporary.rename(target)


def _swap_names(temporary: Path, target: Path) -> None:
    if _swap_in_one_step(temporary, target):
        return
    # The next run removes what has a temporary name: not this one, of which there may be no other.
    retired = (target.parent / temporary_name()).with_suffix(".old")
    target.rename(retired)
    try:
        temporary.rename(target)
    except BaseException:
        retired.rename(target)
        raise
    retired.rename(temporary)


def _swap_in_one_step(first: Path, second: Path) -> bool:
    """Let the kernel swap two names; False if it didn't, for whatever reason."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    failed: int = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return not failed


def _flush_to_disk(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows gives no handle on a folder
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _NO_FLUSH):
            raise
    finally:
        os.close(descriptor)


def _hint(error: OSError) -> str | None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _MAKE_ROOM
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return "choose a folder that you may write to"
    if isinstance(error, NotADirectoryError | FileExistsError):
        return "a part of this path is a file, not a folder: choose another name"
    return None
