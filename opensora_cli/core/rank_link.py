"""Link between a rank and its launcher: heartbeats with progress, and the reason for the end of the rank.

The link is one end of a socket pair, so that the kernel tells each side when the other has ended. A thread sends a
heartbeat every second, also while the main thread hangs in a collective. Waiting for a peer is no error: only the
launcher, which sees all ranks, can distinguish a hung rank from the ranks that wait for it.
"""

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import IO, Literal

from opensora_cli.core.exceptions import HardwareError, OsoraError, OutputError, RequestError
from opensora_cli.core.formatting import escaped, plain, shown_path
from opensora_cli.core.locks import open_regular
from opensora_cli.core.ranks import LOG_VARIABLE, RankContext
from opensora_cli.core.signals import end_with_parent, held_back

CHANNEL_VARIABLE = "OSORA_RANK_CHANNEL"
"""Variable that the launcher sets to the file descriptor of the rank's end of the link."""
TRACEBACK_SIGNAL = getattr(signal, "SIGQUIT", None)
"""Signal at which a rank writes its traceback to its log."""

INTERRUPTED = 130
FIRST_STAGE = "start"
"""Stage of a rank before its first `beat`."""
SILENCE_S = 60.0
SILENT_STEPS = 10
_LATE = 3
"""Multiple of the time without work after which a step takes too long even if the rank works: its processor may be
shared with many other processes."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """State of a rank, sent every second."""

    stage: str = FIRST_STAGE
    moves: int = 0
    """Number of progress reports; ranks with the same work have similar numbers."""
    idle_s: float = SILENCE_S
    """Timeout without a sign of work. Reaching it is no error in a rank that waits for a working rank."""
    late_s: float | None = None
    """Timeout of the step even if the rank works. None means no limit."""
    on_device: bool = False
    """Whether the stage computes on the rank's device: polling a GPU then uses processor time, which is no work."""
    waits: bool = False
    """Whether the main thread appears to wait for other ranks, as in a collective."""


class OwnTime:
    """Clock that counts at most `most_s` between two looks, so that a stopped or slow watcher causes no timeouts."""

    def __init__(self, most_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._clock = most_s, clock
        self._looked = clock()
        self.now = 0.0
        """Seconds since the start."""

    def look(self) -> float:
        """Record a look, and return the seconds since the start."""
        before, self._looked = self._looked, self._clock()
        self.now += min(self._looked - before, self._most_s)
        return self.now


@contextmanager
def linked(context: RankContext, *, silence_s: float = SILENCE_S, silent_steps: int = SILENT_STEPS) -> Iterator[None]:
    """Keep the link open inside the block.

    A rank that osora's launcher started ends at once when the launcher has ended. It reports its progress, and the
    launcher decides. Ranks of torchrun and Slurm have no common watcher: such a rank ends with a message if it has
    reported the time of a step and the next step takes far longer. The shortest timeout without progress is
    `silence_s`, or the time of `silent_steps` steps if that is longer.

    Raises RequestError if the launcher's variable is invalid, and OutputError if the log cannot be written.
    """
    global _link
    channel: socket.socket | None = None
    number = os.environ.pop(CHANNEL_VARIABLE, None)  # child processes must not inherit it
    try:
        channel = socket.socket(fileno=int(number)) if number else None
    except (OSError, ValueError, OverflowError) as error:
        raise RequestError(
            f"{CHANNEL_VARIABLE}={plain(str(number))} is not the end of a link: only the launcher of osora sets it",
            hint=f"unset {CHANNEL_VARIABLE}",
        ) from error
    try:
        # The log stays open: faulthandler may need it until the process is gone.
        log = open(context.log, "ab", buffering=0, opener=open_regular) if context.log else None  # noqa: SIM115
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(
            f"cannot write the rank's log {shown_path(str(context.log))}: {reason}", hint=f"unset {LOG_VARIABLE}"
        ) from error
    _link = link = _Link(context, channel, log, silence_s=silence_s, silent_steps=silent_steps)
    link.start()
    try:
        yield
    finally:
        _link = None
        link.stop()


def beat(stage: str, step_s: float | None = None, *, on_device: bool = False) -> None:
    """Report that the main thread makes progress; without effect in a process that is no rank.

    Args:
        stage: name of the present stage.
        step_s: seconds of a step. Without work, the next `beat` must come within the larger of 60 s and ten times this,
            and in any case within three times that. None means no limit while this rank or another works.
        on_device: whether the stage computes on the rank's device.
    """
    if _link is not None:
        _link.beat(stage, step_s, on_device=on_device)


def move() -> None:
    """Report that a part of a step is done; without effect in a process that is no rank."""
    if _link is not None:
        _link.moves += 1


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


class _Link:
    """Rank's end of the link."""

    def __init__(
        self,
        context: RankContext,
        channel: socket.socket | None,
        log: IO[bytes] | None,
        *,
        silence_s: float,
        silent_steps: int,
    ) -> None:
        self._context, self.channel, self.log = context, channel, log
        self._silence_s, self._silent_steps = silence_s, silent_steps
        self.state = Heartbeat(idle_s=silence_s)
        self.moves = 0
        self._time = OwnTime(2 * _BEAT_S)
        self._beaten_at = 0.0
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="rank-link", daemon=True)

    def start(self) -> None:
        if self.channel is not None:
            self.channel.set_inheritable(False)
            self.channel.settimeout(_SEND_S)
            # The end of the launcher, also by SIGKILL, ends a rank even if it is stopped or hangs.
            end_with_parent()
            if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                # Scripts ignore SIGINT in background commands. A rank gets it only from the launcher.
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.log is not None:
            faulthandler.enable(self.log)
            if TRACEBACK_SIGNAL is not None:
                faulthandler.register(TRACEBACK_SIGNAL, self.log)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self.channel is not None:
            _ignore_interrupts()
            self.channel.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()

    def beat(self, stage: str, step_s: float | None, *, on_device: bool) -> None:
        idle_s = self._silence_s if step_s is None else max(self._silence_s, self._silent_steps * step_s)
        late_s, is_new = None if step_s is None else _LATE * idle_s, stage != self.state.stage
        self.moves += 1
        self.state = Heartbeat(stage=stage, idle_s=idle_s, late_s=late_s, on_device=on_device)
        self._beaten_at = self._time.now
        if is_new:
            self._send_state()

    def _live(self) -> None:
        while not self._ended.is_set():
            if self.channel is None:
                silent_s, late_s = self._time.look() - self._beaten_at, self.state.late_s
                if late_s is not None and silent_s >= late_s:
                    self._end(silent_s)
                self._ended.wait(_BEAT_S)
                continue
            self._send_state()
            if select.select([self.channel], [], [], _BEAT_S)[0] and not self._ended.is_set():
                os.kill(os.getpid(), signal.SIGKILL)  # a rank never receives data: the launcher has ended

    def _end(self, silent_s: float) -> None:
        where = f"rank {self._context.rank} on {socket.gethostname()}, in the stage {self.state.stage}"
        print(escaped(f"error: {where}: no progress for {silent_s:.0f} s"), file=sys.stderr, flush=True)
        os._exit(HardwareError.exit_code)

    def _send_state(self) -> None:
        self.send({"beat": asdict(replace(self.state, moves=self.moves, waits=_main_thread_waits()))})

    def send(self, message: object) -> None:
        if self.channel is not None:
            with held_back(), self._sending, suppress(OSError):  # a partial line would break the next one
                self.channel.sendall(json.dumps(message).encode() + b"\n")


def _ignore_interrupts() -> None:
    """Ignore SIGINT from now on: an exiting rank would print a traceback beside the launcher's message."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _main_thread_waits() -> bool:
    main = threading.main_thread().ident
    frame = None if main is None else sys._current_frames().get(main)
    module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return any(module == waiting or module.startswith(f"{waiting}.") for waiting in _WAITING)


_link: _Link | None = None
