"""Atomic writing of files: a crash leaves the old file or the new one, never a part of one."""

import ctypes
import errno
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opensora_cli.core.exceptions import OsoraWarning, OutputError
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.temporary_files import remove, remove_left, temporary_name

_MAKE_ROOM = "make room there, or write to another disk"
_ANOTHER_NAME = "write to another name"
_ANOTHER_PLACE = "choose another name, or another folder"

# Room for indexes, folders and other metadata of the file system.
_HEADROOM = 2**20

_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems on which a folder cannot be flushed."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of Linux's renameat2


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on leaving, the file or folder that was written there becomes `path`.

    Missing parent folders are created. The file is flushed to the disk before it is renamed, and removed if the block
    fails or is interrupted, so that `path` never holds a partial result. The temporary name has another extension: a
    writer that guesses its format from the name needs the format as an argument. Without `replace`, an existing
    `path` is kept, unless it is an empty folder and a folder was written. See `take_name`.

    Raises:
        OutputError: an operating system error while creating, writing (also in the block), flushing or renaming, with
            `path` and the cause; or `path` is a special file such as a device; or it exists and must not be replaced.
    """
    target = Path(path)
    with temporary_beside(target) as temporary:
        yield temporary
        flush(temporary)
        take_name(temporary, target, replace=replace)


@contextmanager
def atomic_folder(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[Path]:
    """Yield a new temporary folder beside `path`; on leaving, it becomes `path` with all its contents.
    Arguments and errors are the same as in `atomic_path`.
    """
    with atomic_path(path, replace=replace) as temporary:
        temporary.mkdir()
        yield temporary


@contextmanager
def temporary_beside(target: Path) -> Iterator[Path]:
    """Yield an unused name beside `target`, and remove the file or folder of that name at the end.

    The parent folder is created. Raises OutputError, with `target`, for an operating system error in the block or a
    special file such as a device.
    """
    with writing(target):
        refuse_special(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_left(target.parent)
        temporary = target.parent / temporary_name()
        try:
            yield temporary
        finally:
            remove(temporary)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Raise operating system errors of the block as OutputError that names `target`."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}", hint=_hint(error)) from error


def take_name(temporary: Path, target: Path, *, replace: bool, swap: bool = False) -> None:
    """Rename a flushed file or folder to `target` in the same folder.

    With `swap`, a replaced file has the name `temporary` afterwards if the file system can swap names.

    An existing folder is replaced as a whole. If Linux and the file system support it, the two swap names in one step,
    and the caller removes the old one. Otherwise the old one is renamed first, and a crash in that instant leaves it
    under the name `.osora-*.old`, which no run removes. A link to a folder is replaced by the folder; its target
    stays. A parent folder that cannot be flushed to the disk causes a warning.
    Raises OSError, or OutputError if `target` exists and must not be replaced.
    """
    is_folder = temporary.is_dir()
    if replace and is_folder and target.is_dir():
        _swap_names(temporary, target)
    elif replace:
        # Unlike renaming, swapping would put a file in the place of a folder.
        if not swap or target.is_dir() or not _swap_in_one_step(temporary, target):
            temporary.replace(target)
    else:
        try:
            # A folder can only be renamed over an empty folder.
            temporary.rename(target) if is_folder else _link_or_rename(temporary, target)
        except OSError as error:
            if not os.path.lexists(target):
                raise
            raise OutputError(f"{target} exists already", hint=_ANOTHER_NAME) from error
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
    """Flush a file, or a folder with its contents, to the disk. Raises OSError."""
    for path in [*(sorted(written.rglob("*")) if written.is_dir() else []), written]:
        _flush_to_disk(path)


def replace_folder(temporary: Path, target: Path) -> None:
    """Rename a folder with flushed files to `target` in the same parent folder, and remove the previous `target`.
    Raises OSError if this is not possible.
    """
    for folder in [*(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
        _flush_to_disk(folder)
    take_name(temporary, target, replace=True)
    remove(temporary)


def write_bytes_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path` through `atomic_path`. Raises OutputError like `atomic_path`."""
    with atomic_path(path) as temporary, open(temporary, "xb") as file:
        file.write(content)


def write_json_atomic(path: str | os.PathLike[str], document: object) -> None:
    """Write `document` to `path` as JSON through `atomic_path`. Raises like `atomic_path` and `json_bytes`."""
    write_bytes_atomic(path, json_bytes(document))


def json_bytes(document: object) -> bytes:
    """Return `document` as indented UTF-8 JSON.

    NaN and infinity are refused because other JSON readers do not accept them.
    Raises ValueError or TypeError if `document` cannot be written as JSON.
    """
    text = json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False)
    # A shell argument that is not UTF-8 reaches Python as lone surrogates; the backslash form is their JSON escape.
    return (text + "\n").encode("utf-8", "backslashreplace")


def user_cache(kind: str) -> Path | None:
    """Return the folder of the user's cache for `kind`, which may not exist; None if the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "osora" / kind
    except RuntimeError:
        return None


def refuse_special(path: Path) -> None:
    """Refuse a device, pipe or socket as the target of a result because renaming would replace it.
    Raises OutputError if `path` is such a file.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OutputError(f"{path} is neither a file nor a folder", hint=_ANOTHER_NAME)


def nearest_existing(path: Path) -> Path:
    """Return `path` or its nearest existing parent, which has the disk and permissions of a new file."""
    return next((place for place in (path, *path.absolute().parents) if place.exists()), Path("/"))


def require_writable(path: Path, *, overwrite: bool) -> None:
    """Check that a file can be written at `path`, before the work for it begins.
    Raises OutputError if it is a folder or a device, exists and must not be replaced, cannot be accessed, or if its
    folder is read-only.
    """
    with writing(path):
        refuse_special(path)
        if path.is_dir():
            raise OutputError(f"{path} is a folder", hint="name a file in it")
        if os.path.lexists(path) and not overwrite:
            raise OutputError(f"{path} exists already", hint="use --overwrite to replace it, or another name")
        folder = nearest_existing(path.absolute().parent)
    if not folder.is_dir():
        raise OutputError(f"cannot write in {folder}: it is not a folder", hint=_ANOTHER_PLACE)
    if not os.access(folder, os.W_OK):
        raise OutputError(f"cannot write in {folder}", hint=_ANOTHER_PLACE)


def require_space(path: Path, needed: int) -> None:
    """Check that the disk of `path` has room for `needed` more bytes. `path` need not exist.
    Raises OutputError if the room is too small.
    """
    with writing(path):
        usage = shutil.disk_usage(nearest_existing(path))
    # Some network file systems do not report their size.
    if usage.total and usage.free < needed + _HEADROOM:
        raise OutputError(
            f"{path} needs {format_bytes(needed)}, and its disk has {format_bytes(usage.free)} free", hint=_MAKE_ROOM
        )


def _link_or_rename(temporary: Path, target: Path) -> None:
    """Give a file an unused name. Linking, unlike renaming, never replaces a file."""
    try:
        os.link(temporary, target)
    except OSError:  # a file system without links
        if os.path.lexists(target):
            raise
        temporary.rename(target)


def _swap_names(temporary: Path, target: Path) -> None:
    if _swap_in_one_step(temporary, target):
        return
    # The next run removes temporary names. This folder may be the only copy, so that it gets another suffix.
    retired = (target.parent / temporary_name()).with_suffix(".old")
    target.rename(retired)
    try:
        temporary.rename(target)
    except BaseException:
        retired.rename(target)
        raise
    retired.rename(temporary)


def _swap_in_one_step(first: Path, second: Path) -> bool:
    """Swap two names in the kernel; return False if that was not possible."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    failed: int = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return not failed


def _flush_to_disk(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
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
