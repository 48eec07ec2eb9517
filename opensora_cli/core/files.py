"""Atomic writing of files: a crash leaves the old file or the new one, never a part of one.

Temporary files and folders have the ID of their process in the name. The next run removes those of ended processes.
Locks would not work: shared file systems often have none, or only locks within one machine.
"""

import ctypes
import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships none

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.locks import locked_file

_MAKE_ROOM = "make room there, or write to another disk"
_ANOTHER_NAME = "write to another name"
_ANOTHER_PLACE = "choose another name, or another folder"

# Room for indexes, folders and other metadata of the file system.
_HEADROOM = 2**20

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of Linux's renameat2

_NAME = re.compile(r"\.osora-([0-9a-f]{8})-(\d+)-[0-9a-f]{16}\.tmp")
"""Name with the place and the number of a process."""
_LEAST_AGE_S = 60.0
_OUT_OF_SIGHT_S = 24 * 3600.0
"""Seconds without a change after which a file is abandoned if its process cannot be seen from here."""

_looked_through: set[tuple[int, Path]] = set()


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on leaving, the file or folder that was written there becomes `path`.

    Missing parent folders are created. The file is flushed to the disk before it is renamed, and removed if the block
    fails or is interrupted. The temporary name has another extension: a writer that guesses its format from the name
    needs the format as an argument. Without `replace`, an existing `path` is kept, unless it is an empty folder and a
    folder was written. See `take_name`.

    Raises OutputError, with `path` and the cause, for any error of the operating system, also in the block; and if
    `path` is a special file such as a device, or exists and must not be replaced.
    """
    target = Path(path)
    with temporary_beside(target) as temporary:
        yield temporary
        flush(temporary)
        take_name(temporary, target, replace=replace)


@contextmanager
def atomic_folder(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[Path]:
    """Yield a new temporary folder beside `path`, which becomes `path` on leaving, like `atomic_path`."""
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
    under the name `.osora-*.old`, which no run removes. A link to a folder is replaced by the folder; its target stays.
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
    _flush_to_disk(target.parent)


def flush(written: Path) -> None:
    for path in [*(sorted(written.rglob("*")) if written.is_dir() else []), written]:
        _flush_to_disk(path)


def replace_folder(temporary: Path, target: Path) -> None:
    """Rename a folder with flushed files to `target` beside it, and remove the previous `target`. Raises OSError."""
    for folder in [*(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
        _flush_to_disk(folder)
    take_name(temporary, target, replace=True)
    remove(temporary)


def write_bytes_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    with atomic_path(path) as temporary, open(temporary, "xb") as file:
        file.write(content)


def write_json_atomic(path: str | os.PathLike[str], document: object) -> None:
    write_bytes_atomic(path, json_bytes(document))


def json_bytes(document: object) -> bytes:
    """Return `document` as indented UTF-8 JSON.

    Raises TypeError if it cannot be written, and ValueError for NaN and infinity, which other readers do not accept.
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
    """Raise OutputError for a device, pipe or socket as the target of a result: renaming would replace it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OutputError(f"{path} is neither a file nor a folder", hint=_ANOTHER_NAME)


def nearest_existing(path: Path) -> Path:
    """Return `path` or its nearest existing parent, which has the disk and permissions of a new file."""
    return next((place for place in (path, *path.absolute().parents) if place.exists()), Path("/"))


def require_writable(path: Path, *, overwrite: bool) -> None:
    """Raise OutputError, before the work for it begins, if a file cannot be written at `path`."""
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
    """Raise OutputError if the disk of `path`, which need not exist, has no room for `needed` more bytes."""
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
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    failed: int = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return not failed


def _flush_to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, which not every system can flush."""
    is_folder = path.is_dir()
    with suppress(OSError) if is_folder else nullcontext():
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
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


def temporary_name() -> str:
    # The final name is not part of it because that may already have the largest length.
    # Sixteen random digits prevent links under all possible names.
    return f".osora-{_place()}-{os.getpid()}-{secrets.token_hex(8)}.tmp"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new temporary folder of the system, which is removed with its contents at the end.

    Only this account can read it. Raises OutputError if it cannot be created.
    """
    parent = Path(tempfile.gettempdir())
    remove_left(parent)
    folder = parent / temporary_name()
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise OutputError(f"cannot make a temporary folder in {parent}: {error.strerror or error}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_left(folder: Path, *, by: Collection[int] = ()) -> None:
    """Remove the abandoned temporary files and the lock files without a holder from `folder`. Failures are ignored.

    Each process does this once per folder, and again for the temporary files of `by`, the IDs of ended processes.
    """
    look = os.getpid(), folder.absolute()
    if look in _looked_through and not by:
        return
    _looked_through.add(look)
    with suppress(OSError):
        for path in folder.iterdir():
            if is_abandoned(path, ended=by):
                remove(path)
    if sys.platform != "win32":
        for path in folder.glob(".osora-*.lock"):
            with suppress(OSError, OutputError), locked_file(path):
                pass


def is_abandoned(path: Path, *, ended: Collection[int] = ()) -> bool:
    """Return whether a file or folder has a `temporary_name`, and nothing uses it.

    Its process is one of `ended`, or has ended and not changed the file for a minute. A process on another machine or
    in another container cannot be seen from here; the limit is then a day.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        return False
    is_of_here, pid = match[1] == _place(), int(match[2])
    if is_of_here and (pid in ended or psutil.pid_exists(pid)):
        return pid in ended
    with suppress(OSError):
        inside: Iterable[Path] = () if path.is_symlink() else path.rglob("*")
        last_change = max(each.lstat().st_mtime for each in [path, *inside])
        return time.time() - last_change > (_LEAST_AGE_S if is_of_here else _OUT_OF_SIGHT_S)
    return False


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its contents, if it exists. Failures are ignored."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


@cache
def _place() -> str:
    """Return an ID of the machine and the container, in which processes are numbered."""
    try:
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:  # not Linux
        namespace = ""
    return hashlib.sha256(f"{platform.node()} {namespace}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
