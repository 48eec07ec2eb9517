"""Link between a rank and its launcher: heartbeats with progress, and the reason for the end of the rank.

The link is one end of a socket pair, so that the kernel tells each side when the other has ended. A thread sends a
heartbeat every second, also while the main thread hangs in a collective. Waiting for a peer is no error: only the
launcher, which sees all ranks, can distinguish a hung rank from the ranks that wait for it. Ranks of torchrun and Slurm
have no link: each watches its own steps.
"""

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal

from opensora_cli.core.exceptions import HardwareError, OsoraError
from opensora_cli.core.files import writing
from opensora_cli.core.formatting import escaped, plain
from opensora_cli.core.locks import open_regular
from opensora_cli.core.ranks import RankContext
from opensora_cli.core.signals import end_with_parent, held_back

CHANNEL_VARIABLE = "OSORA_RANK_CHANNEL"
"""Variable that the launcher sets to the file descriptor of the rank's end of the link."""
TRACEBACK_SIGNAL = getattr(signal, "SIGQUIT", None)
"""Signal at which a rank writes its traceback to its log."""
INTERRUPTED = 130
FIRST_STAGE = "start"
"""Stage of a rank before its first `beat`."""

SILENCE_S = 60.0
"""Shortest time without a sign of work after which a rank counts as hung."""
STEP_SILENCE_S = 12.0
"""The same between two steps on a CPU, where all work uses processor time or the disk."""
_SILENT_STEPS = 10
_ALONE = 3
"""Multiple of these times without progress after which a rank without a launcher ends: others may still work."""

_BEAT_S = 1.0
_SEND_S = 5.0
_WAITING = ("torch.distributed", "opensora_cli.parallel")
"""Modules with functions that wait for other ranks."""

Kind = Literal["error", "bug", "lost", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Reason for the end of a rank. `exit_code` is that of the whole run, and `message` has one problem per line.

    The kinds are `error` (a user can fix it), `lost` (another rank has ended, which is seldom the cause),
    `interrupted` (the rank was asked to end) and `bug` (anything else).
    """

    kind: Kind
    message: str
    hint: str | None
    exit_code: int


@dataclass(slots=True, kw_only=True)
class Heartbeat:
    """State of a rank, sent every second."""

    stage: str = FIRST_STAGE
    moves: int = 0
    """Number of progress reports; ranks with the same work have similar numbers."""
    step_s: float | None = None
    """Seconds of the longest step of the stage. None while unknown, and outside of steps."""
    waits: bool = False
    """Whether the main thread appears to wait for other ranks, as in a collective."""


def idle_limit(step_s: float | None, *, on_gpu: bool = True) -> float:
    """Return the seconds without a sign of work after which a rank counts as hung, see `Heartbeat.step_s`."""
    least_s = SILENCE_S if on_gpu or step_s is None else STEP_SILENCE_S
    return max(least_s, _SILENT_STEPS * (step_s or 0.0))


class _Link:
    """Rank's end of the link."""

    def __init__(self, context: RankContext, channel: socket.socket | None, log: IO[bytes] | None) -> None:
        self._context, self.channel, self.log, self.state = context, channel, log, Heartbeat()
        self._sending, self._ended = threading.Lock(), threading.Event()

    def send(self, message: object) -> None:
        if self.channel is not None:
            with held_back(), self._sending, suppress(OSError):  # a partial line would break the next one
                self.channel.sendall(json.dumps(message).encode() + b"\n")

    def send_state(self) -> None:
        self.state.waits = _main_thread_waits()
        self.send({"beat": asdict(self.state)})

    @contextmanager
    def open(self) -> Iterator[None]:
        if self.log is not None:
            faulthandler.enable(self.log)
            if TRACEBACK_SIGNAL is not None:
                faulthandler.register(TRACEBACK_SIGNAL, self.log)
        if self.channel is not None:
            self.channel.set_inheritable(False)
            self.channel.settimeout(_SEND_S)
            # The end of the launcher, also by SIGKILL, ends a rank even if it is stopped or hangs.
            end_with_parent()
            if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                # Scripts ignore SIGINT in background commands. A rank gets it only from the launcher.
                signal.signal(signal.SIGINT, signal.default_int_handler)
        watch = self._watch_steps if self.channel is None else partial(self._live, self.channel)
        thread = threading.Thread(target=watch, name="rank-link", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            if self.channel is not None:
                _ignore_interrupts()
                self.channel.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()

    def _live(self, channel: socket.socket) -> None:
        while not self._ended.is_set():
            self.send_state()
            if select.select([channel], [], [], _BEAT_S)[0] and not self._ended.is_set():
                os.kill(os.getpid(), signal.SIGKILL)  # a rank never receives data: the launcher has ended

    def _watch_steps(self) -> None:
        """End the process if a step takes far longer than the previous ones, by a clock that stops with the process."""
        moves, silent_s = 0, 0.0
        while not self._ended.wait(_BEAT_S):
            silent_s = silent_s + _BEAT_S if self.state.moves == moves else 0.0
            moves, step_s = self.state.moves, self.state.step_s
            if step_s is not None and silent_s >= _ALONE * idle_limit(step_s):
                where = f"rank {self._context.rank} on {socket.gethostname()}, in the stage {self.state.stage}"
                print(escaped(f"error: {where}: no progress for {silent_s:.0f} s"), file=sys.stderr, flush=True)
                os._exit(HardwareError.exit_code)


_link: _Link | None = None


@contextmanager
def linked(context: RankContext) -> Iterator[None]:
    """Keep the link open inside the block. A rank that osora's launcher started ends at once when that has ended.

    Raises OutputError if the log cannot be written.
    """
    global _link
    number = os.environ.pop(CHANNEL_VARIABLE, None)  # child processes must not inherit it
    channel = socket.socket(fileno=int(number)) if number else None
    _link = _Link(context, channel, None if context.log is None else _opened(context.log))
    try:
        with _link.open():
            yield
    finally:
        _link = None


def _opened(log: Path) -> IO[bytes]:
    # The log stays open: faulthandler may need it until the process is gone.
    with writing(log):
        return open(log, "ab", buffering=0, opener=open_regular)


def beat(stage: str, step_s: float | None = None) -> None:
    """Report that the main thread makes progress; without effect in a process that is no rank.

    `stage` is the name of the present stage, and `step_s` the seconds of its longest step, see `Heartbeat`.
    """
    if _link is not None:
        is_new = stage != _link.state.stage
        _link.state.stage, _link.state.step_s = stage, step_s
        _link.state.moves += 1
        if is_new:
            _link.send_state()


def move() -> None:
    """Report that a part of a step is done; without effect in a process that is no rank."""
    if _link is not None:
        _link.state.moves += 1


def current_stage() -> str | None:
    """Return the stage of this rank; None in a process that is no rank."""
    return None if _link is None else _link.state.stage


def report_left(lines: Callable[[], Sequence[str]]) -> bool:
    """Tell the launcher how to continue if this rank is killed; return False, without `lines`, if there is none."""
    if _link is None or _link.channel is None:
        return False
    _link.send({"left": "\n".join(lines())})
    return True


def report_failure(message: str, *, hint: str | None = None, exit_code: int) -> bool:
    """Report an error that a user can fix to the launcher; return False if there is none: the caller must print it."""
    return _report("interrupted" if exit_code == INTERRUPTED else "error", message, hint, exit_code)


def report_bug(error: BaseException) -> bool:
    """Report an unexpected error, and write its traceback to the rank's log. Returns the same as `report_failure`."""
    if _link is not None and _link.log is not None:
        with suppress(OSError):
            _link.log.write("".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace"))
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    message = f"{type(error).__name__}: {plain(line)}".removesuffix(": ")
    if is_loss(error):
        return _report("lost", message, None, HardwareError.exit_code)
    return _report("bug", message, None, OsoraError.exit_code)


def _report(kind: Kind, message: str, hint: str | None, exit_code: int) -> bool:
    if _link is None or _link.channel is None:
        return False
    _ignore_interrupts()
    _link.send({"report": asdict(RankReport(kind=kind, message=message, hint=hint, exit_code=exit_code))})
    return True


def is_loss(error: BaseException) -> bool:
    """Return whether a collective failed because peers have ended. It compares names to avoid importing torch."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in names or ("RuntimeError" in names and "gloo/" in str(error))


def _ignore_interrupts() -> None:
    """Ignore SIGINT from now on: an exiting rank would print a traceback beside the launcher's message."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _main_thread_waits() -> bool:
    main = threading.main_thread().ident
    frame = None if main is None else sys._current_frames().get(main)
    module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return any(module == waiting or module.startswith(f"{waiting}.") for waiting in _WAITING)
