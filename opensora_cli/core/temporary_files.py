"""Temporary files and folders with the ID of their process in the name. The next run removes those of ended processes.

Locks would not work: shared file systems often have none, or only locks within one machine.
"""

import hashlib
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.locks import locked_file

_NAME = re.compile(r"\.osora-([0-9a-f]{8})-(\d+)-[0-9a-f]{16}\.tmp")
"""Name with the place and the number of a process."""
_LEAST_AGE_S = 60.0
_OUT_OF_SIGHT_S = 24 * 3600.0
"""Seconds without a change after which a file is abandoned if its process cannot be seen from here."""

_looked_through: set[tuple[int, Path]] = set()


def temporary_name() -> str:
    """Return an unused name for a temporary file or folder of this process."""
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


def remove_left(folder: Path) -> None:
    """Remove the abandoned temporary files and the lock files without a holder from `folder`.

    Each process does this once per folder. Failures are ignored.
    """
    look = os.getpid(), folder.absolute()
    if look in _looked_through:
        return
    _looked_through.add(look)
    with suppress(OSError):
        for path in folder.iterdir():
            if is_abandoned(path):
                remove(path)
    remove_unheld_locks(folder)


def remove_left_by(pids: Collection[int], folder: Path) -> None:
    """Remove temporary files of ended child processes, and lock files without a holder, from `folder` at once.

    Failures are ignored.
    """
    with suppress(OSError):
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match is not None and match[1] == _place() and int(match[2]) in pids:
                remove(path)
    remove_unheld_locks(folder)


def remove_unheld_locks(folder: Path) -> None:
    """Remove lock files without a holder from `folder`. Failures are ignored."""
    if sys.platform == "win32":
        return
    with suppress(OSError):
        for path in folder.glob(".osora-*.lock"):
            with suppress(OSError, OutputError), locked_file(path):
                pass


def is_abandoned(path: Path) -> bool:
    """Return whether a file or folder has a `temporary_name`, and nothing uses it.

    Its process has ended, and it has not changed for a minute. A process on another machine or in another container
    cannot be seen from here; the limit is then a day.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        return False
    is_of_here = match[1] == _place()
    if is_of_here and _may_run(int(match[2])):
        return False
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


def _may_run(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True


@cache
def _place() -> str:
    """Return an ID of the machine and the container, in which processes are numbered."""
    try:
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:  # not Linux
        namespace = ""
    return hashlib.sha256(f"{platform.node()} {namespace}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
