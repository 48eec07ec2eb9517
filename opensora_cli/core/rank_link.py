"""What connects a rank with the launcher that started it: signs of life, progress, and the reason of its end.

The link is one end of a socket pair, so that each side learns from the kernel when the other is gone. A thread says
every second that the process lives: a stopped process falls silent. That thread goes on while the main thread hangs in
a collective, so it also measures the time since the main thread last told its progress, and ends the process when that
takes far longer than a step.
"""

import ctypes
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Literal

from opensora_cli.core.exceptions import HardwareError, OsoraError
from opensora_cli.core.listing import plain
from opensora_cli.core.ranks import RankContext

CHANNEL_VARIABLE = "OSORA_RANK_CHANNEL"
"""Set by our launcher: the file descriptor of a rank's end."""

INTERRUPTED = 130
SILENCE_S = 60.0
SILENT_STEPS = 10

_BEAT_S = 1.0
_SEND_S = 5.0
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl

Kind = Literal["error", "bug", "lost", "silent", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Why a rank ends.

    Args:
        kind: `error`: a user can act on it; `lost`: another rank is gone, which is seldom the cause; `silent`: no
            progress for too long; `interrupted`: it was asked to end; `bug`: anything else.
        message: what is wrong, one problem a line.
        hint: how to mend it.
        exit_code: of the whole run.
    """

    kind: Kind
    message: str
    hint: str | None
    exit_code: int


@contextmanager
def linked(
    context: RankContext | None, *, silence_s: float = SILENCE_S, silent_steps: int = SILENT_STEPS
) -> Iterator[None]:
    """Keep the link open inside the block; a process that is no rank has none.

    A rank that our launcher started ends at once when the launcher is gone. All ranks, also those of torchrun and of
    Slurm, end with a message when they have told a step's time and are then silent for too long.

    Args:
        context: which rank this is.
        silence_s: seconds without progress after which a rank ends, if ten steps are not longer.
        silent_steps: how many steps' time that is.
    """
    global _link
    if context is None:
        yield
        return
    number = os.environ.pop(CHANNEL_VARIABLE, None)  # not for what this process starts
    channel = socket.socket(fileno=int(number)) if number else None
    link = _Link(context, channel, silence_s=silence_s, silent_steps=silent_steps)
    _link = link
    try:
        link.start()
        yield
    finally:
        _link = None
        link.stop()


def beat(stage: str, step_s: float | None = None) -> None:
    """Say that the main thread got on; without effect in a process that is no rank.

    Args:
        stage: what it does now.
        step_s: seconds of a step; from now until the next `beat` no more may pass than the larger of 60 s and ten
            times that. None: this may take as long as it takes.
    """
    if _link is not None:
        _link.beat(stage, step_s)


def report_failure(message: str, *, hint: str | None = None, exit_code: int) -> bool:
    """Tell the launcher of an error that a user can act on.

    Returns:
        Whether there is a launcher, which then tells it. If not, the caller must.
    """
    kind: Kind = "interrupted" if exit_code == INTERRUPTED else "error"
    return _report(RankReport(kind=kind, message=message, hint=hint, exit_code=exit_code))


def report_bug(error: BaseException) -> bool:
    """Tell the launcher of an error that is not ours, and write its traceback to the rank's log.

    Returns:
        As `report_failure`.
    """
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
    _link.report(report)
    return True


def is_loss(error: BaseException) -> bool:
    """Whether a collective failed for want of its peers; without torch, since this must not import it."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in names or ("RuntimeError" in names and "gloo/" in str(error))


class _Link:
    """The rank's end."""

    def __init__(
        self, context: RankContext, channel: socket.socket | None, *, silence_s: float, silent_steps: int
    ) -> None:
        self._context = context
        self._channel = channel
        self._silence_s = silence_s
        self._silent_steps = silent_steps
        self._sending = threading.Lock()
        self._progress: tuple[str, float, float | None] = ("start", time.monotonic(), None)
        """Stage, when it last got on, and how long it may take."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="rank-link", daemon=True)
        self._log = context.log.open("ab", buffering=0) if context.log else None

    @property
    def has_launcher(self) -> bool:
        return self._channel is not None

    def start(self) -> None:
        if self._channel is not None:
            self._channel.set_inheritable(False)
            self._channel.settimeout(_SEND_S)
            if sys.platform == "linux":
                # The launcher's end, SIGKILL included, also ends a rank that is stopped or hangs.
                ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                # So in the background of a script. Here it comes from the launcher alone.
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._log is not None:
            faulthandler.enable(self._log)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._channel is not None:
            self._channel.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        # The log stays open: faulthandler may need it until the process is gone.

    def beat(self, stage: str, step_s: float | None) -> None:
        limit = None if step_s is None else max(self._silence_s, self._silent_steps * step_s)
        is_new = stage != self._progress[0]
        self._progress = (stage, time.monotonic(), limit)
        if is_new:
            self._send({"stage": stage})

    def report(self, report: RankReport) -> None:
        self._send({"report": asdict(report)})

    def log(self, text: str) -> None:
        """Write to the log alone: what rank 0 prints reaches the terminal, too."""
        if self._log is not None:
            with suppress(OSError):
                self._log.write(text.encode("utf-8", "backslashreplace"))

    def _live(self) -> None:
        while not self._ended.is_set():
            self._send({})
            self._end_if_silent()
            if self._channel is None:
                self._ended.wait(_BEAT_S)
            elif select.select([self._channel], [], [], _BEAT_S)[0] and not self._ended.is_set():
                os.kill(os.getpid(), signal.SIGKILL)  # nothing is ever sent to a rank: the launcher is gone

    def _end_if_silent(self) -> None:
        stage, since, limit = self._progress
        silent_s = time.monotonic() - since
        if limit is None or silent_s < limit:
            return
        if self._log is not None:
            faulthandler.dump_traceback(self._log)
        message = f"no progress for {silent_s:.0f} s"
        code = HardwareError.exit_code
        self.report(RankReport(kind="silent", message=message, hint=None, exit_code=code))
        if not self.has_launcher:
            where = f"rank {self._context.rank} on {socket.gethostname()}, in the stage {stage}"
            print(f"error: {where}: {message}", file=sys.stderr, flush=True)
        os._exit(code)

    def _send(self, message: object) -> None:
        if self._channel is None:
            return
        with self._sending, suppress(OSError):
            self._channel.sendall(json.dumps(message).encode() + b"\n")


_link: _Link | None = None
