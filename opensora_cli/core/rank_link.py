"""Link between a rank and its launcher: heartbeats, progress, and the reason for the end of the rank.

The link is one end of a socket pair, so that the kernel tells each side when the other has ended. A thread sends a
pulse every second; a stopped process sends none. That thread keeps running while the main thread hangs in a
collective, so it also checks whether the main thread makes progress. Waiting for a peer is no error: only the launcher,
which sees all ranks, can distinguish a hung rank from the ranks that wait for it.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

from opensora_cli.core.exceptions import HardwareError, OsoraError, OutputError, RequestError
from opensora_cli.core.formatting import escaped, plain, shown_path
from opensora_cli.core.ranks import LOG_VARIABLE, RankContext
from opensora_cli.core.regular_files import open_regular
from opensora_cli.core.signals import end_with_parent, held_back

CHANNEL_VARIABLE = "OSORA_RANK_CHANNEL"
"""Variable that the launcher sets to the file descriptor of the rank's end of the link."""

INTERRUPTED = 130
FIRST_STAGE = "start"
"""Stage of a rank before its first `beat`."""
SILENCE_S = 60.0
SILENT_STEPS = 10

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
class Pulse:
    """Heartbeat of a rank, sent every second.

    Args:
        moves: number of progress reports; ranks with the same work have similar numbers.
        still_s: seconds without a sign of work.
        is_idle: whether `still_s` is too long. This is no error in a rank that waits for a working rank.
        is_late: whether a step takes too long, even if the rank works.
        waits: whether the main thread appears to wait for other ranks, as in a collective.
    """

    moves: int = 0
    still_s: float = 0.0
    is_idle: bool = False
    is_late: bool = False
    waits: bool = False


class OwnTime:
    """Clock of a watching process that leaves out the time in which the process itself could not run.

    At most `most_s` counts between two looks, and no time for which the main thread waited for a processor. So a slow
    machine or a stopped watcher causes no timeouts of others. `clock` returns seconds, and `delays` returns the seconds
    of waiting for a processor.
    """

    def __init__(
        self, most_s: float, *, clock: Callable[[], float] = time.monotonic, delays: Callable[[], float] | None = None
    ) -> None:
        self._most_s = most_s
        self._clock, self._delays = clock, delays or (lambda: 0.0)
        self._last = 0.0, clock(), self._delays()

    def now(self) -> float:
        """Return the seconds since the start."""
        return self._read()[0]

    def look(self) -> float:
        """Record a look, and return the seconds since the start."""
        self._last = self._read()
        return self._last[0]

    def _read(self) -> tuple[float, float, float]:
        own_s, looked, delayed_s = self._last
        clock_s, delays_s = self._clock(), self._delays()
        passed_s = min(clock_s - looked, self._most_s) - (delays_s - delayed_s)
        return own_s + max(0.0, passed_s), clock_s, delays_s


@contextmanager
def linked(context: RankContext, *, silence_s: float = SILENCE_S, silent_steps: int = SILENT_STEPS) -> Iterator[None]:
    """Keep the link open inside the block.

    A rank that osora's launcher started ends at once when the launcher has ended. It reports a lack of progress, and
    the launcher decides. Ranks of torchrun and Slurm have no common watcher: such a rank ends with a message if it has
    reported the time of a step and the next step takes far longer.

    Raises RequestError if the launcher's variable is invalid, and OutputError if the log cannot be written.

    Args:
        silence_s: shortest timeout without progress, in seconds.
        silent_steps: number of steps whose time is the timeout if that is longer.
    """
    global _link
    number = os.environ.pop(CHANNEL_VARIABLE, None)  # child processes must not inherit it
    channel = _channel(number) if number else None
    link = _Link(context, channel, silence_s=silence_s, silent_steps=silent_steps)
    _link = link
    try:
        link.start()
        yield
    finally:
        _link = None
        link.stop()


def _channel(number: str) -> socket.socket:
    try:
        return socket.socket(fileno=int(number))
    except (OSError, ValueError, OverflowError) as error:
        raise RequestError(
            f"{CHANNEL_VARIABLE}={plain(number)} is not the end of a link: only the launcher of osora sets it",
            hint=f"unset {CHANNEL_VARIABLE}",
        ) from error


def _opened_log(path: Path) -> IO[bytes]:
    try:
        return open(path, "ab", buffering=0, opener=open_regular)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(
            f"cannot write the rank's log {shown_path(path)}: {reason}", hint=f"unset {LOG_VARIABLE}"
        ) from error


def beat(stage: str, step_s: float | None = None, *, on_device: bool = False) -> None:
    """Report that the main thread makes progress; without effect in a process that is no rank.

    Args:
        stage: name of the present stage.
        step_s: seconds of a step. The next `beat` must come within the larger of 60 s and ten times this. None means
            no limit while this rank or another works.
        on_device: whether the stage computes on the rank's device, see `device_is_gpu`.
    """
    if _link is not None:
        _link.beat(stage, step_s, on_device=on_device)


def move() -> None:
    """Report that a part of a step is done; without effect in a process that is no rank."""
    if _link is not None:
        _link.moves += 1


def device_is_gpu() -> None:
    """Ignore processor time as a sign of work in stages that compute on the device, from now on.

    A thread that waits for a GPU, for example in a collective, uses processor time because it polls.
    """
    if _link is not None:
        _link.is_on_gpu = True


def current_stage() -> str | None:
    """Return the stage of this rank; None in a process that is no rank."""
    return None if _link is None else _link.stage


def report_left(lines: Callable[[], Sequence[str]]) -> bool:
    """Tell the launcher how to continue if this rank is killed; return False, without `lines`, if there is none."""
    if _link is None or not _link.has_launcher:
        return False
    _link.send({"left": "\n".join(lines())})
    return True


def report_failure(message: str, *, hint: str | None = None, exit_code: int) -> bool:
    """Report an error that a user can fix to the launcher; return False if there is none: the caller must print it."""
    kind: Kind = "interrupted" if exit_code == INTERRUPTED else "error"
    return _report(RankReport(kind=kind, message=message, hint=hint, exit_code=exit_code))


def report_bug(error: BaseException) -> bool:
    """Report an unexpected error, and write its traceback to the rank's log. Returns the same as `report_failure`."""
    if _link is None or not _link.has_launcher:
        return False
    _link.log("".join(traceback.format_exception(error)))
    lines = [line for line in str(error).splitlines() if line.strip()]
    message = f"{type(error).__name__}: {plain(lines[0].strip())}" if lines else type(error).__name__
    if is_loss(error):
        return _report(RankReport(kind="lost", message=message, hint=None, exit_code=HardwareError.exit_code))
    return _report(RankReport(kind="bug", message=message, hint=None, exit_code=OsoraError.exit_code))


def _report(report: RankReport) -> bool:
    if _link is None or not _link.has_launcher:
        return False
    _ignore_interrupts()
    _link.send({"report": asdict(report)})
    return True


def is_loss(error: BaseException) -> bool:
    """Return whether a collective failed because peers have ended. It compares names to avoid importing torch."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in names or ("RuntimeError" in names and "gloo/" in str(error))


class _Link:
    """Rank's end of the link."""

    def __init__(
        self, context: RankContext, channel: socket.socket | None, *, silence_s: float, silent_steps: int
    ) -> None:
        self.moves = 0
        self.is_on_gpu = False
        self._context = context
        self._channel = channel
        self._silence_s = silence_s
        self._silent_steps = silent_steps
        self._sending = threading.Lock()
        self._time = OwnTime(2 * _BEAT_S, delays=_main_delays())
        self._progress = _Progress(FIRST_STAGE, self._time.now(), None, on_device=False)
        self._signs: object = None
        self._worked = self._time.now()
        self._has_logged_traceback = False
        self._main_clock = _main_clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="rank-link", daemon=True)
        self._log = _opened_log(context.log) if context.log else None

    @property
    def has_launcher(self) -> bool:
        return self._channel is not None

    @property
    def stage(self) -> str:
        return self._progress.stage

    def start(self) -> None:
        if self._channel is not None:
            self._channel.set_inheritable(False)
            self._channel.settimeout(_SEND_S)
            # The end of the launcher, also by SIGKILL, ends a rank even if it is stopped or hangs.
            end_with_parent()
            if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                # Scripts ignore SIGINT in background commands. A rank gets it only from the launcher.
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._log is not None:
            faulthandler.enable(self._log)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._channel is not None:
            _ignore_interrupts()
            self._channel.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        # The log stays open: faulthandler may need it until the process is gone.

    def beat(self, stage: str, step_s: float | None, *, on_device: bool) -> None:
        limit_s = None if step_s is None else max(self._silence_s, self._silent_steps * step_s)
        is_new = stage != self._progress.stage
        self.moves += 1
        self._progress = _Progress(stage, self._time.now(), limit_s, on_device=on_device)
        if is_new:
            self.send({"stage": stage})

    def log(self, text: str) -> None:
        """Write to the log, not to the terminal, which shows the output of rank 0."""
        if self._log is not None:
            with suppress(OSError):
                self._log.write(text.encode("utf-8", "backslashreplace"))

    def _live(self) -> None:
        while not self._ended.is_set():
            pulse = self._pulse()
            if pulse.is_idle or pulse.is_late:
                self._log_traceback()
            else:
                self._has_logged_traceback = False
            self.send({"pulse": asdict(pulse)})
            if self._channel is None:
                if pulse.is_late:
                    self._end(pulse)
                self._ended.wait(_BEAT_S)
            elif select.select([self._channel], [], [], _BEAT_S)[0] and not self._ended.is_set():
                os.kill(os.getpid(), signal.SIGKILL)  # a rank never receives data: the launcher has ended

    def _pulse(self) -> Pulse:
        now, progress = self._time.look(), self._progress
        signs = self._signs_of_work()
        if signs != self._signs:
            self._worked = now
        self._signs = signs
        still_s, silent_s = now - self._worked, now - progress.since
        limit_s = progress.limit_s
        return Pulse(
            moves=self.moves,
            still_s=max(still_s, silent_s if limit_s is not None else 0.0),
            is_idle=still_s >= (limit_s or self._silence_s),
            is_late=limit_s is not None and silent_s >= limit_s,
            waits=_main_thread_waits(),
        )

    def _signs_of_work(self) -> object:
        cpu_s = None if self.is_on_gpu and self._progress.on_device else self._main_clock()
        if sys.platform == "win32":
            return self.moves, cpu_s
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        # Mapped files are read by major faults.
        return self.moves, cpu_s, usage.ru_majflt, usage.ru_inblock, usage.ru_oublock

    def _log_traceback(self) -> None:
        if self._log is not None and not self._has_logged_traceback:
            self._has_logged_traceback = True
            faulthandler.dump_traceback(self._log)
            self._signs = self._signs_of_work()  # the traceback was no work of the main thread

    def _end(self, pulse: Pulse) -> None:
        where = f"rank {self._context.rank} on {socket.gethostname()}, in the stage {self.stage}"
        print(escaped(f"error: {where}: no progress for {pulse.still_s:.0f} s"), file=sys.stderr, flush=True)
        os._exit(HardwareError.exit_code)

    def send(self, message: object) -> None:
        if self._channel is not None:
            with held_back(), self._sending, suppress(OSError):  # a partial line would break the next one
                self._channel.sendall(json.dumps(message).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class _Progress:
    """Time of the last progress of the main thread, and the limit for the next."""

    stage: str
    since: float
    limit_s: float | None
    on_device: bool


def _ignore_interrupts() -> None:
    """Ignore SIGINT from now on: an exiting rank would print a traceback beside the launcher's message."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _main_clock() -> Callable[[], float]:
    """Return a clock of the main thread's processor time; if unknown, that of all threads except the calling one."""
    main = threading.main_thread().ident
    if sys.platform == "linux" and main is not None:
        clock = time.pthread_getcpuclockid(main)
        return lambda: time.clock_gettime(clock)
    return lambda: time.process_time() - time.thread_time()


def _main_delays() -> Callable[[], float] | None:
    """Return a function for the seconds that the main thread has waited for a processor; None if unknown."""
    path = Path(f"/proc/self/task/{os.getpid()}/schedstat")

    def read() -> float:
        try:
            return int(path.read_bytes().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # a kernel without these figures
            return 0.0

    return read if sys.platform == "linux" else None


def _main_thread_waits() -> bool:
    main = threading.main_thread().ident
    frame = None if main is None else sys._current_frames().get(main)
    module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return any(module == waiting or module.startswith(f"{waiting}.") for waiting in _WAITING)


_link: _Link | None = None
