"""Requests to end a process: who sends them, what waits for them, and how the processes that it started end.

Ctrl-C is SIGINT. Schedulers, containers and `timeout` send SIGTERM, and often to all processes of a group; Slurm's
`--signal` and the warnings of other schedulers are SIGUSR1, SIGUSR2 or SIGXCPU. A terminal that goes away, as at a lost
ssh connection, sends SIGHUP; nohup has it ignored. Some send twice: `timeout` signals the command and then its group,
a shell hands SIGHUP on to its jobs, and torchrun hands on what the terminal has already sent to its ranks.
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
"""What asks a process to end, besides Ctrl-C."""
_TERMINAL_GONE = getattr(signal, "SIGHUP", None)
REPEAT_S = 0.3
"""A second Ctrl-C within so many seconds is the first one sent twice: nobody presses keys so fast."""

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def leave_signals_to(parent: int) -> None:
    """Ignore Ctrl-C and requests to end from now on, in a process that ends with its `parent`, a process's number."""
    for number in (signal.SIGINT, *END_REQUESTS):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    if os.getppid() != parent:  # it was gone before
        os._exit(0)


@contextmanager
def blocked_in_children() -> Iterator[None]:
    """Block Ctrl-C and requests to end in processes that are started inside the block, from their start.

    They do not unblock them. This process gets what came meanwhile at the end of the block.
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
    """Hold back Ctrl-C, and requests to end that have a handler, until the end of the block, and then send the first,
    also where the block raises.

    Without effect outside of the main thread, which alone gets signals.
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
    """Only record Ctrl-C and requests to end while the block runs; a second Ctrl-C raises KeyboardInterrupt.

    A request to end never does, however often it comes: who sends it sends SIGKILL later. Python handles signals in the
    main thread alone, so that a block elsewhere is never interrupted anyway. A signal that is ignored, as Ctrl-C is in
    the background of a script, stays ignored. `report` is called at the first one, in another thread: the main one may
    hold any lock. Yields a function that returns whether there was one.
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
def requests_as_interrupts() -> Iterator[None]:
    """Let a request to end do what Ctrl-C does at that time, inside the block.

    Where Ctrl-C is ignored, as in the background of a script, a request to end raises KeyboardInterrupt. One that is
    repeated at once changes nothing, nor does SIGHUP after another request. SIGTERM always counts, the others unless
    they were ignored, or handled, before the block.
    """
    last: float | None = None

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        # The terminal goes away once: a second SIGHUP comes of the end of its shell, whenever that is.
        if last is not None and (now - last < REPEAT_S or number == _TERMINAL_GONE):
            return
        last = now
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)
        else:
            signal.default_int_handler(number, frame)

    def is_wanted(number: signal.Signals) -> bool:
        # Nothing ignores SIGTERM for its children on purpose.
        return number == signal.SIGTERM or (number in END_REQUESTS and signal.getsignal(number) is signal.SIG_DFL)

    with _handled(end, wanted=is_wanted):
        yield


def _has_handler(number: signal.Signals) -> bool:
    return callable(signal.getsignal(number))


@contextmanager
def _handled(
    handle: Callable[[int, FrameType | None], object], *, wanted: Callable[[signal.Signals], bool]
) -> Iterator[None]:
    """Let `handle` take the signals that are `wanted`, of Ctrl-C and requests to end, inside the block."""
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
