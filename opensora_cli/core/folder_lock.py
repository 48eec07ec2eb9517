"""One process at a time in a folder."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from opensora_cli.core.exceptions import OutputError

LOCK_FILE = ".lock"

_held: set[int] = set()


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keep other processes that do the same out of a folder for the length of the block.

    The system lets go of the lock when the process ends, however it ends; a file `.lock` that is left then means
    nothing by itself. On Windows, and on file systems without locks, the lock has no effect. The folder is made if it
    is not there, and removed again if nothing is in it at the end.

    Raises:
        OutputError: another process is in the folder, which is named with its number; or the folder cannot be made.
    """
    if sys.platform == "win32":
        yield
        return
    is_new = not folder.exists()
    lock = _open_locked(folder)
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / LOCK_FILE).unlink()
            if is_new:
                folder.rmdir()
        _close(lock)


def _open_locked(folder: Path) -> int:
    """Return the lock file, open and locked."""
    path = folder / LOCK_FILE
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
        _held.add(lock)
        try:
            _lock(lock, folder)
            # The previous holder may have removed the file after it was opened here.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(lock)):
                return lock
        except BaseException:
            _close(lock)
            raise
        _close(lock)


def _lock(lock: int, folder: Path) -> None:
    import fcntl  # Windows has none

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 100, 0).decode("utf-8", "replace").strip() or "one that has just begun"
        raise OutputError(
            f"{folder} is in use by another run: {holder}",
            hint="wait until it ends or end it, or give another folder: --set output=FOLDER",
        ) from None
    except OSError:
        return
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)


def _close(lock: int) -> None:
    _held.discard(lock)
    os.close(lock)


def _close_all() -> None:
    for lock in _held:
        os.close(lock)
    _held.clear()


if sys.platform != "win32":
    # A forked process shares its parent's lock, and would hold it beyond the parent's death.
    os.register_at_fork(after_in_child=_close_all)
