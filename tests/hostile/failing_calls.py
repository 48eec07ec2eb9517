"""The library that breaks system calls: how it is built, and how a process is armed with it. See `failing_calls.c`."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path


class Breakage(IntEnum):
    """What happens to a call; numbers as in `failing_calls.c`."""

    COUNT = 0
    KILL = 1
    EIO_ONCE = 2
    EIO_ON = 3
    ENOSPC_ON = 4
    EINTR_ONCE = 5
    SEND_INT = 6
    SEND_TERM = 7


BREAKAGES = tuple(each for each in Breakage if each is not Breakage.COUNT)


_kept: list[object] = []
"""What C calls, which Python would forget."""


def build(folder: Path) -> Path | None:
    """Build the library in a folder, for LD_PRELOAD; None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library, source = folder / "failing_calls.so", Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def arm(folder: str, log: str, breakage: int, number: int) -> None:
    """Count the calls of this process that change files below `folder`, and break that of a number.

    `log` is a file that gets a line for each, with an exclamation mark before the first that is broken.
    """
    fail_calls = ctypes.CDLL(None).fail_calls
    fail_calls.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_long)
    if fail_calls(os.fsencode(folder), os.fsencode(log), breakage, number):
        raise OSError(f"calls below {folder} are not watched: {log}")


def hold(folder: str, at_first_call: Callable[[], None]) -> None:
    """Have this process call a function before its first call that changes files below `folder`."""
    callback = ctypes.CFUNCTYPE(None)(at_first_call)
    _kept.append(callback)
    if ctypes.CDLL(None).hold_calls(os.fsencode(folder), callback):
        raise OSError(f"calls below {folder} are not watched")
