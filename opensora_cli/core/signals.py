"""Handling of Ctrl-C and requests to end a process: raised, recorded, delayed or ignored.

Ctrl-C is SIGINT. Schedulers, containers and `timeout` send SIGTERM, often to all processes of a group; Slurm's
`--signal` and the warnings of other schedulers are SIGUSR1, SIGUSR2 or SIGXCPU. A closed terminal, as after a lost ssh
connection, sends SIGHUP; nohup ignores it. Some signals come twice: `timeout` signals the command and then its group,
a shell forwards SIGHUP to its jobs, and torchrun forwards signals that the terminal has sent to its ranks already.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

END_REQUESTS = tuple(
    signal.Signals[name] for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU") if hasattr(signal, name)
)
"""Signals that ask a process to end, besides Ctrl-C."""
_TERMINAL_GONE = getattr(signal, "SIGHUP", None)
REPEAT_S = 0.3
"""Seconds within which a second Ctrl-C counts as a duplicate of the first; nobody presses keys so fast."""

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def leave_signals_to(parent: int) -> None:
    """Ignore Ctrl-C and requests to end from now on, and end with the process whose number is `parent`."""
    for number in (signal.SIGINT, *END_REQUESTS):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    if os.getppid() != parent:  # the parent has ended already
        os._exit(0)


@contextmanager
def blocked_in_children() -> Iterator[None]:
    """Block Ctrl-C and requests to end in processes that are started inside the block, for their whole life.

    This process receives its pending signals at the end of the block.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *END_REQUESTS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def held_back() -> Iterator[None]:
    """Delay Ctrl-C, and requests to end that have a handler, and send the first at the end of the block.

    Without effect outside of the main thread, the only one that gets signals.
    """
    held: list[int] = []
    try:
        with _handled(lambda number, frame: held.append(number), wanted=_has_handler):
            yield
    finally:
        if held:
            signal.raise_signal(held[0])


@contextmanager
def deferred_interrupts(report: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Record Ctrl-C and requests to end while the block runs; yield a function that returns whether either came.

    A second Ctrl-C raises KeyboardInterrupt. A request to end never does: its sender sends SIGKILL later. Ignored
    signals, such as Ctrl-C in the background of a script, stay ignored. The first signal calls `report` in another
    thread because the main one may hold any lock. Outside of the main thread, which gets all signals, nothing is done.
    """
    was_asked = False
    pressed_at: float | None = None

    def record(number: int, frame: FrameType | None) -> None:
        nonlocal was_asked, pressed_at
        if number == signal.SIGINT:
            now = time.monotonic()
            if pressed_at is not None and now - pressed_at >= REPEAT_S:
                raise KeyboardInterrupt
            pressed_at = now if pressed_at is None else pressed_at
        if not was_asked:
            was_asked = True
            threading.Thread(target=report, daemon=True).start()

    def is_wanted(number: signal.Signals) -> bool:
        return _has_handler(number) or (number in END_REQUESTS and signal.getsignal(number) is signal.SIG_DFL)

    with _handled(record, wanted=is_wanted):
        yield lambda: was_asked


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Raise KeyboardInterrupt at Ctrl-C and requests to end; yield a function that returns whether either came.

    An immediate repetition of a signal changes nothing, nor does SIGHUP after another request. SIGTERM always counts,
    the other requests unless they were ignored or handled before the block. Ctrl-C counts unless it is ignored, as in
    the background of a script.
    """
    was_asked = was_requested = False
    last_s = -REPEAT_S

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal was_asked, was_requested, last_s
        before_s, last_s = last_s, time.monotonic()
        # A terminal closes only once: its shell sends SIGHUP again when the shell ends, at any later time.
        if last_s - before_s >= REPEAT_S and not (number == _TERMINAL_GONE and was_requested):
            was_asked, was_requested = True, was_requested or number in END_REQUESTS
            signal.default_int_handler(number, frame)

    def is_wanted(number: signal.Signals) -> bool:
        if number == signal.SIGINT:
            return _has_handler(number)
        # No program makes its children ignore SIGTERM on purpose.
        return number == signal.SIGTERM or signal.getsignal(number) is signal.SIG_DFL

    with _handled(interrupt, wanted=is_wanted):
        yield lambda: was_asked


def _has_handler(number: signal.Signals) -> bool:
    return callable(signal.getsignal(number))


@contextmanager
def _handled(
    handle: Callable[[int, FrameType | None], object], *, wanted: Callable[[signal.Signals], bool]
) -> Iterator[None]:
    """Install a handler for the `wanted` signals among Ctrl-C and the requests to end, inside the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    replaced = [number for number in (signal.SIGINT, *END_REQUESTS) if wanted(number)]
    before = {number: signal.signal(number, handle) for number in replaced}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
