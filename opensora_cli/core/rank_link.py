"""What connects a rank with the launcher that started it: signs of life, progress, and the reason of its end.

The link is one end of a socket pair, so that each side learns from the kernel when the other is gone. A thread sends
a pulse every second: a stopped process falls silent. That thread goes on while the main thread hangs in a collective,
so it also watches whether the main thread makes progress. Waiting on a peer is no error: only the launcher, which sees
all ranks, can distinguish a hung rank from those that wait for it.
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
"""Set by our launcher: the file descriptor of a rank's end."""

INTERRUPTED = 130
FIRST_STAGE = "start"
"""The stage of a rank before its first `beat`."""
SILENCE_S = 60.0
SILENT_STEPS = 10

_BEAT_S = 1.0
_SEND_S = 5.0
_WAITING = ("torch.distributed", "opensora_cli.parallel")
"""Whose functions wait for other ranks."""

Kind = Literal["error", "bug", "lost", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Why a rank ends; `exit_code` is that of the whole run, and `message` has one problem a line.

    The kinds: `error`, a user can act on it; `lost`, another rank is gone, which is seldom the cause; `interrupted`, it
    was asked to end; `bug`, anything else.
    """

    kind: Kind
    message: str
    hint: str | None
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a rank reports of itself every second.

    Args:
        moves: how often it reported progress; ranks that do the same work have about as many.
        still_s: seconds without a sign of work.
        is_idle: whether these are too many; no error in a rank that waits for one that works.
        is_late: whether a step takes too long, whatever the rank does.
        waits: whether it is in a collective, or what else waits for other ranks, as far as can be seen.
    """

    moves: int = 0
    still_s: float = 0.0
    is_idle: bool = False
    is_late: bool = False
    waits: bool = False


class OwnTime:
    """Seconds as a process that watches others has lived through them.

    Of a look that comes late no more than `most_s` counts, and none of the time that its main thread waited for its
    turn on a processor. So little passes where everything is slow, or where the watcher was stopped itself, and nobody
    is reported for that. `clock` counts seconds, `delays` those of waiting for a turn.
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
        """Look, and return the seconds since the start."""
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

    A rank that our launcher started ends at once when the launcher is gone, and reports when it makes no progress: the
    launcher judges. Nothing watches all ranks of torchrun and of Slurm. They end with a message when they have reported
    a step's time and the next takes far longer.

    Raises RequestError if the launcher's variable is nonsense, and OutputError if the log cannot be written.

    Args:
        silence_s: seconds that are too long without progress, if ten steps are not longer.
        silent_steps: how many steps' time that is.
    """
    global _link
    number = os.environ.pop(CHANNEL_VARIABLE, None)  # not for what this process starts
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
        stage: what it does now.
        step_s: seconds of a step; from now until the next `beat` no more may pass than the larger of 60 s and ten
            times that. None: this may take as long as it takes, while this rank or another works.
        on_device: whether the stage computes on the rank's device, see `device_is_gpu`.
    """
    if _link is not None:
        _link.beat(stage, step_s, on_device=on_device)


def move() -> None:
    """Report that a part of a step is done; cheap, and without effect in a process that is no rank."""
    if _link is not None:
        _link.moves += 1


def device_is_gpu() -> None:
    """Count processor time of stages that compute on the device as no sign of work from now on.

    A thread that waits for a GPU, and so for a collective on it, does not sleep but polls it.
    """
    if _link is not None:
        _link.is_on_gpu = True


def current_stage() -> str | None:
    """Return the stage of this rank; None: it is none."""
    return None if _link is None else _link.stage


def report_left(lines: Callable[[], Sequence[str]]) -> bool:
    """Report to the launcher how to go on if this rank is killed; False: there is none, and nobody asks for `lines`."""
    if _link is None or not _link.has_launcher:
        return False
    _link.send({"left": "\n".join(lines())})
    return True


def report_failure(message: str, *, hint: str | None = None, exit_code: int) -> bool:
    """Report to the launcher an error that a user can act on; False: there is none, and the caller must print it."""
    kind: Kind = "interrupted" if exit_code == INTERRUPTED else "error"
    return _report(RankReport(kind=kind, message=message, hint=hint, exit_code=exit_code))


def report_bug(error: BaseException) -> bool:
    """Report an error that is not ours, and write its traceback to the rank's log; returns as `report_failure`."""
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
    """Whether a collective failed because peers are gone; by names, since this must not import torch."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in names or ("RuntimeError" in names and "gloo/" in str(error))


class _Link:
    """The rank's end."""

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
            # The launcher's end, SIGKILL included, also ends a rank that is stopped or hangs.
            end_with_parent()
            if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                # So in the background of a script. Here it comes from the launcher alone.
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
        """Write to the log: what rank 0 prints goes to the terminal."""
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
                os.kill(os.getpid(), signal.SIGKILL)  # nothing is ever sent to a rank: the launcher is gone

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
            self._signs = self._signs_of_work()  # that was no work of the main thread

    def _end(self, pulse: Pulse) -> None:
        where = f"rank {self._context.rank} on {socket.gethostname()}, in the stage {self.stage}"
        print(escaped(f"error: {where}: no progress for {pulse.still_s:.0f} s"), file=sys.stderr, flush=True)
        os._exit(HardwareError.exit_code)

    def send(self, message: object) -> None:
        if self._channel is not None:
            with held_back(), self._sending, suppress(OSError):  # half a line would spoil the next one
                self._channel.sendall(json.dumps(message).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class _Progress:
    """When the main thread last made progress, and how long it may take for the next."""

    stage: str
    since: float
    limit_s: float | None
    on_device: bool


def _ignore_interrupts() -> None:
    """Ignore SIGINT from now on: a rank that only exits would print a traceback beside the launcher's message."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _main_clock() -> Callable[[], float]:
    """Return a clock of the processor time of the main thread, or where that is unknown, of all but the asking one."""
    main = threading.main_thread().ident
    if sys.platform == "linux" and main is not None:
        clock = time.pthread_getcpuclockid(main)
        return lambda: time.clock_gettime(clock)
    return lambda: time.process_time() - time.thread_time()


def _main_delays() -> Callable[[], float] | None:
    """Return what counts the seconds for which the main thread had to wait for a processor; None: not known."""
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
