"""Safe opening of files with predictable names, and locks that let one process at a time use a folder or a file.

Another account, or the archive of a folder, may contain something else under such a name: a link to a file of the
user, a pipe that blocks forever, or a device. `filelock` does not suffice: it opens a file that has other names, and
does not say who holds a lock.
"""

import errno
import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.formatting import plain

LOCK_FILE = ".lock"
"""Name of the lock file of a folder."""

_REFUSALS = (errno.ELOOP, errno.EPERM, errno.EISDIR)
_LONGEST_BYTES = 300


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file and return its descriptor. It can serve in `open(path, mode, opener=open_regular)`.

    A file that is opened for writing must have no other name, and belong to this user or to the owner of its folder,
    who can replace it anyway: some network disks give all files to one owner. It is truncated only after these checks.
    The path may contain links to folders. Raises OSError, with the reason if the file is not regular.
    """
    with suppress(FileNotFoundError):  # Opening has effects on some devices, so check first.
        _check_kind(path, os.lstat(path))
    # The file may be replaced between the two calls: O_NONBLOCK prevents blocking on a pipe.
    safe = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
    descriptor = os.open(path, flags & ~os.O_TRUNC | safe, 0o666)
    try:
        status = os.fstat(descriptor)
        _check_kind(path, status)
        if flags & (os.O_WRONLY | os.O_RDWR):
            _check_owner(path, status)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def hint_for(error: OSError) -> str | None:
    return "move it away, or choose another folder" if error.errno in _REFUSALS else None


def kind_of_file(mode: int) -> str | None:
    """Return the kind of a special file for a message; None for a regular file."""
    kinds = {stat.S_IFREG: None, stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe"}
    return kinds.get(stat.S_IFMT(mode), "socket" if stat.S_ISSOCK(mode) else "device")


def _check_kind(path: str | os.PathLike[str], status: os.stat_result) -> None:
    kind = kind_of_file(status.st_mode)
    if kind == "folder":
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if kind is not None:
        raise OSError(errno.EPERM, f"it is a {kind}", path)


def _check_owner(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if status.st_nlink > 1:
        raise OSError(errno.EPERM, "it is one of several hard links to a file", path)
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        folder = os.stat(os.path.dirname(os.path.abspath(path)))
        if status.st_uid != folder.st_uid:
            raise OSError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})", path)


@contextmanager
def locked_file(path: Path) -> Iterator[bool]:
    """Lock a file for the duration of the block, and yield whether this process holds the lock.

    The system releases the lock when the process ends; a remaining file has no meaning. On Windows, and on file systems
    without locks, the lock has no effect. A missing folder is created, and the file is removed at the end. Raises
    OutputError if the file cannot be created.
    """
    if sys.platform == "win32":
        yield True
        return
    try:
        lock = _open_locked(path)
    except OSError as error:
        hint = hint_for(error)  # None if the fault does not lie with the lock file itself
        what = f"in {path.parent}" if hint is None else f"the lock file {path}"
        raise OutputError(f"cannot write {what}: {error.strerror or error}", hint=hint) from error
    try:
        yield lock is not None
    finally:
        if lock is not None:
            with suppress(OSError):
                path.unlink()
            os.close(lock)


@contextmanager
def sole_run(lock: Path, *, problem: str, hint: str) -> Iterator[None]:
    """Lock a file like `locked_file`, or raise OutputError (`PROBLEM: process N on HOST`) if another process holds it.

    A folder that was created for the lock is removed again if it is empty at the end.
    """
    is_new = not lock.parent.exists()
    try:
        with locked_file(lock) as is_ours:
            if not is_ours:
                raise OutputError(f"{problem}: {lock_holder(lock)}", hint=hint)
            yield
    finally:
        if is_new:
            with suppress(OSError):
                lock.parent.rmdir()


def lock_beside(path: Path, of: str) -> Path:
    """Return the lock file beside `path` for the resource `of`, a name of any length."""
    digest = hashlib.sha256(of.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return path.with_name(f".osora-{digest}.lock")


def lock_holder(path: Path) -> str:
    """Return the holder of a lock file as text: `process N on HOST`."""
    with suppress(OSError), open(path, "rb", opener=open_regular) as file:
        if holder := file.read(_LONGEST_BYTES).decode("utf-8", "replace").strip():
            return plain(holder)
    return "one that has just begun"


def _open_locked(path: Path) -> int | None:
    """Return the descriptor of the lock file, locked; None if another process has locked it. Raises OSError."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            if not _lock(lock):
                os.close(lock)
                return None
            # The previous holder may have removed the file after it was opened here.
            with suppress(FileNotFoundError):
                if os.path.samestat(path.lstat(), os.fstat(lock)):
                    _write_owner(lock, path)
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _lock(lock: int) -> bool:
    import fcntl  # missing on Windows

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # another one is of a file system without locks
        return not isinstance(error, BlockingIOError)
    return True


def _write_owner(lock: int, path: Path) -> None:
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    except OSError:
        path.unlink(missing_ok=True)
        raise
