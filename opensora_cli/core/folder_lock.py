"""Locks that let one process at a time use a folder or a file.

`filelock` does not suffice: it truncates the lock file when it opens it, and also opens a file that has other names.
A lock file has a predictable name in a folder that others may write to.
"""

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.formatting import plain
from opensora_cli.core.left_overs import is_first_look, remove_abandoned
from opensora_cli.core.regular_files import hint_for, open_regular

LOCK_FILE = ".lock"
"""Name of the lock file of a folder."""

_LONGEST_BYTES = 300

_held: set[int] = set()


@contextmanager
def locked_file(path: Path) -> Iterator[bool]:
    """Lock a file for the duration of the block, and yield whether this process holds the lock.

    The system releases the lock when the process ends, however it ends; a remaining file has no meaning. On Windows,
    and on file systems without locks, the lock has no effect. A missing folder is created, and the file is removed at
    the end. Raises OutputError if the file cannot be created.
    """
    if sys.platform == "win32":
        yield True
        return
    lock = _open_locked(path)
    if lock is None:
        yield False
        return
    remove_left(path.parent)
    try:
        yield True
    finally:
        with suppress(OSError):
            path.unlink()
        _close(lock)


@contextmanager
def sole_run(lock: Path, *, problem: str, hint: str) -> Iterator[None]:
    """Lock a file like `locked_file`, and raise an error if another process holds the lock.

    A folder that was created for the lock is removed again if it is empty at the end.

    Raises:
        OutputError: another process holds it: `PROBLEM: process N on HOST`; or the file cannot be created.
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


def remove_left(folder: Path) -> None:
    """Remove the temporary files of ended processes from `folder`, see `remove_abandoned`, and lock files without a
    holder. Each process does this once per folder. Failures are ignored.
    """
    if is_first_look(folder):
        remove_abandoned(folder)
        remove_unheld_locks(folder)


def remove_unheld_locks(folder: Path) -> None:
    """Remove lock files without a holder from `folder`. Failures are ignored."""
    if sys.platform == "win32":
        return
    with suppress(OSError):
        for path in folder.glob(".osora-*.lock"):
            with suppress(OSError, OutputError), locked_file(path):
                pass


def _open_locked(path: Path) -> int | None:
    """Return the descriptor of the lock file, locked; None if another process has locked it."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if hint_for(error) is not None:  # the fault lies with the lock file itself
                raise _problem(path, error) from error
            raise OutputError(f"cannot write in {path.parent}: {error.strerror or error}") from error
        _held.add(lock)
        try:
            if not _lock(lock):
                _close(lock)
                return None
            # The previous holder may have removed the file after it was opened here.
            with suppress(FileNotFoundError):
                if os.path.samestat(path.lstat(), os.fstat(lock)):
                    _write_owner(lock, path)
                    return lock
        except BaseException:
            _close(lock)
            raise
        _close(lock)


def _lock(lock: int) -> bool:
    import fcntl  # missing on Windows

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


def _write_owner(lock: int, path: Path) -> None:
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise _problem(path, error) from error


def _problem(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write the lock file {path}: {error.strerror or error}", hint=hint_for(error))


def _close(lock: int) -> None:
    _held.discard(lock)
    os.close(lock)


def _close_all() -> None:
    for lock in _held:
        os.close(lock)
    _held.clear()


if sys.platform != "win32":
    # A forked process shares its parent's lock, and would hold it after the parent has ended.
    os.register_at_fork(after_in_child=_close_all)
