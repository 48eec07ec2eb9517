"""Launcher's view of the ranks: their processes, log files, reports and failures."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships none

from opensora_cli.core.exceptions import HardwareError, OsoraError
from opensora_cli.core.formatting import plain
from opensora_cli.core.locks import open_regular
from opensora_cli.core.ranks import (
    CHANNEL_VARIABLE,
    FIRST_STAGE,
    INTERRUPTED,
    LOG_VARIABLE,
    TRACEBACK_SIGNAL,
    Heartbeat,
    RankReport,
)

SILENCE_S = 60.0
"""Shortest time without a sign of work after which a rank counts as hung."""
STEP_SILENCE_S = 12.0
"""The same between two steps on a CPU, where all work uses processor time or the disk."""
_SILENT_STEPS = 10
_CHUNK = 2**16
_LOG_END = 4096
_SHOW_CURSOR = "\x1b[?25h"
_LEAST_WORK_S = 0.1
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP}
_HINTS: dict[int, str] = {
    signal.SIGKILL: "if no user killed it, the system did for lack of memory (see dmesg): use fewer --gpus on this "
    "machine, stronger --offload, or a smaller --res",
    signal.SIGBUS: "a file that it read was truncated, or /dev/shm is full",
}
_HUNG_HINT = "its log shows where it hangs; osora bench-comm shows whether the links are good"
_KINDS = ("signal", "stopped", "error", "bug", "exit", "interrupted", "behind", "silent", "abort", "lost")
"""Kinds of failures; a kind is more likely the origin of all failures than those after it.

A rank that dies ends its peers: their connections are closed, and NCCL's watchdog then aborts them.
"""


class RankFailure(OsoraError):
    """A rank failed, and so the run ends; the message names rank, host, stage, cause and log file."""

    def __init__(self, message: str, *, hint: str | None, exit_code: int, kind: str = "exit") -> None:
        super().__init__(message, hint=hint)
        self.exit_code, self.kind = exit_code, kind

    @property
    def is_reported(self) -> bool:
        """Whether the rank raised an error. Otherwise it was killed, crashed, hung or lost the others."""
        return self.kind in ("error", "bug")

    @property
    def may_follow(self) -> bool:
        """Whether to wait for more failures: this may follow from another, or others may report the same error."""
        return self.kind in ("error", "silent", "abort", "lost")


class RankProcess:
    """Process of a rank, started and watched by the launcher.

    Signs of work are progress reports, bytes read and written, and processor time of the main thread. Processor time
    counts because a rank that imports, or is in a library that blocks other threads, cannot send messages. It does not
    count between the steps of a GPU, which the main thread may poll.

    Rank 0 inherits stdout and stderr, so that its progress bars work. The other ranks print to their logs.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path, *, on_gpu: bool = False
    ) -> None:
        self.rank, self.log = rank, log
        self.state = Heartbeat()
        self.report: RankReport | None = None
        self.left: str | None = None
        self.stopped_s = self.idle_s = 0.0
        """Seconds for which the rank is stopped, and gives no sign of work."""
        self._on_gpu = on_gpu
        self._signs: tuple[object, ...] = ()
        self._children_s = 0.0
        self._unread = b""
        self._code: int | None = None
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        # The rank's link also writes to the log: both append.
        with theirs, open(log, "ab", opener=open_regular) as file:
            file.truncate(0)
            os.fchmod(file.fileno(), 0o600)
            output = None if rank == 0 else file
            self._process = subprocess.Popen(
                command,
                env={**environment, LOG_VARIABLE: str(log.absolute()), CHANNEL_VARIABLE: str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                # Ctrl-C at the terminal goes to the launcher, which forwards it.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_idle(self) -> bool:
        """Whether the rank has given no sign of work for too long. This is no error if it waits for a working rank."""
        return self.idle_s >= self._limit_s

    @property
    def _limit_s(self) -> float:
        step_s = self.state.step_s
        least_s = SILENCE_S if self._on_gpu or step_s is None else STEP_SILENCE_S
        return max(least_s, _SILENT_STEPS * (step_s or 0.0))

    @property
    def has_begun(self) -> bool:
        return self.state.stage != FIRST_STAGE

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs. Remaining child processes are killed."""
        if self._code is None:
            self._code = self._process.poll()
            if self._code is not None:
                self._signal_group(signal.SIGKILL)
        return self._code

    def listen(self) -> None:
        with suppress(BlockingIOError, ConnectionError):
            while chunk := self._channel.recv(_CHUNK):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "beat" in message:
                self.state = Heartbeat(**message["beat"])
            self.left = message.get("left", self.left)
            if "report" in message and self.report is None:
                self.report = RankReport(**message["report"])

    def look(self, passed_s: float) -> None:
        """Receive messages, and look for signs of work; `passed_s` seconds have passed since the last look."""
        self.listen()
        may_poll = self._on_gpu and self.state.step_s is not None
        signs = self.state.moves, self._disk_bytes(), None if may_poll else self._processor_time()
        before_s, self.idle_s = self.idle_s, self.idle_s + passed_s if signs == self._signs else 0.0
        if before_s < self._limit_s / 2 <= self.idle_s:
            self._children_s, _ = self._hidden_work()  # to be compared at the limit
        self.stopped_s = self.stopped_s + passed_s if self.is_stopped() else 0.0
        self._signs = signs

    def is_stopped(self) -> bool:
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def has_hidden_work(self) -> bool:
        """Return whether child processes have worked since the last call, or half of the limit, or a disk is slow."""
        before_s, (self._children_s, waits_for_disk) = self._children_s, self._hidden_work()
        if self._children_s < before_s + _LEAST_WORK_S and not waits_for_disk:
            return False
        self.idle_s = 0.0
        return True

    def _hidden_work(self) -> tuple[float, bool]:
        """Return the processor time of all child processes, and whether a thread of any process waits for a disk."""
        children_s, waits_for_disk = 0.0, False
        with suppress(psutil.Error):
            rank = psutil.Process(self.pid)
            for process in (rank, *rank.children(recursive=True)):
                with suppress(psutil.Error, OSError):
                    threads = Path(f"/proc/{process.pid}/task").glob("*/stat")
                    waits_for_disk |= any(_fields(thread)[0] == b"D" for thread in threads)
                    # The last two are of children that have ended: compilers start one after the other.
                    times = process.cpu_times()[:4]
                    children_s += sum(times[2:] if process == rank else times)
        return children_s, waits_for_disk

    def log_traceback(self) -> None:
        if TRACEBACK_SIGNAL is not None and self.has_begun and self.exit_code() is None:
            self._process.send_signal(TRACEBACK_SIGNAL)

    def interrupt(self) -> None:
        """Send SIGINT to the rank, or kill it if it has not begun: it would only print a traceback."""
        self.listen()
        if not self.has_begun:
            self.kill()
        elif self.exit_code() is None:
            self._process.send_signal(signal.SIGINT)

    def terminate(self) -> None:
        if self.exit_code() is None:
            self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the rank and its child processes."""
        if self.exit_code() is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        self._channel.close()
        if self.rank == 0 and sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(_SHOW_CURSOR)  # a rank that is killed during its progress bar leaves the cursor hidden

    def failure(self, code: int) -> RankFailure:
        """Return the failure of a rank that ended with `code`, which is not 0, and negative for a signal."""
        self.listen()  # receive messages between the last look and its end
        report = self.report
        if report is None and code < 0:
            return self._killed(-code)
        if report is None:
            last = self._last_line()
            cause = f"ended with exit code {code}" + (f": {plain(last)}" if last else "")
            return self._failure("exit", cause, exit_code=code)
        if report.kind == "error":
            # The message stays as reported because a user can fix it.
            hint = "\n".join(filter(None, [report.hint, f"reported by {self._where}", f"log: {self.log}"]))
            return RankFailure(report.message, hint=hint, exit_code=report.exit_code, kind="error")
        if report.kind == "interrupted":
            return self._failure("interrupted", "interrupted", hint=report.hint, exit_code=INTERRUPTED)
        cause = f"lost the others: {report.message}" if report.kind == "lost" else report.message
        return self._failure(report.kind, cause, hint=report.hint, exit_code=report.exit_code)

    def stopped(self) -> RankFailure:
        return self._failure("stopped", f"stopped (SIGSTOP), no sign of life for {self.stopped_s:.0f} s")

    def hung(self) -> RankFailure:
        if self.is_stopped():
            return self.stopped()
        cause = f"no progress for {self.idle_s:.0f} s"
        if self.state.waits:
            return self._failure("silent", f"{cause}, it waits for other ranks", hint=_HUNG_HINT)
        return self._failure("behind", cause, hint=_HUNG_HINT)

    @property
    def _where(self) -> str:
        return f"rank {self.rank} on {socket.gethostname()}, in the stage {self.state.stage}"

    def _last_line(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LOG_END))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _killed(self, number: int) -> RankFailure:
        try:
            name = signal.Signals(number).name
        except ValueError:  # a real-time signal
            name = f"signal {number}"
        is_crash, kind = number in _CRASHES, "abort" if number == signal.SIGABRT else "signal"
        cause = f"{'crashed' if is_crash else 'killed'} ({name})"
        exit_code = OsoraError.exit_code if is_crash else HardwareError.exit_code
        return self._failure(kind, cause, hint=_HINTS.get(number), exit_code=exit_code)

    def _failure(
        self, kind: str, cause: str, *, hint: str | None = None, exit_code: int = HardwareError.exit_code
    ) -> RankFailure:
        hint = "\n".join(filter(None, [hint, f"log: {self.log}"]))
        return RankFailure(f"{self._where}: {cause}", hint=hint, exit_code=exit_code, kind=kind)

    def _signal_group(self, number: int) -> None:
        # macOS refuses if the group contains only ended processes.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _disk_bytes(self) -> object:
        """Return the bytes that all threads have read and written; None if unknown, as on macOS."""
        with suppress(OSError, psutil.Error):
            if sys.platform == "linux":
                return psutil.Process(self.pid).io_counters()[2:4]
        return None

    def _processor_time(self) -> object:
        """Return the processor time and major faults of the main thread; mapped files are read by major faults."""
        try:
            if sys.platform != "linux":
                # Of all threads: whole seconds hide the little that heartbeats use.
                return int(sum(psutil.Process(self.pid).cpu_times()[:2]))
            fields = _fields(Path(f"/proc/{self.pid}/task/{self.pid}/stat"))
            return fields[9], fields[11], fields[12]
        except (OSError, IndexError, psutil.Error):
            return None


def _fields(stat: Path) -> list[bytes]:
    """Return the fields of a thread after its name, which is in parentheses and may contain spaces: see proc(5)."""
    return stat.read_bytes().rpartition(b")")[2].split()


def origin(found: Iterable[RankFailure]) -> RankFailure:
    return min(found, key=lambda failure: _KINDS.index(failure.kind))


def behind(ranks: Iterable[RankProcess]) -> RankProcess:
    """Return the rank to blame for a hang: a stopped one, or one that does not wait, or that with least progress."""
    return min(ranks, key=lambda rank: (not rank.is_stopped(), rank.state.waits, rank.state.moves, rank.rank))


def shared_error(ranks: Sequence[RankProcess]) -> RankFailure | None:
    """Return the user's error if all ranks report the same one, else None. It names no rank and no log."""
    report = ranks[0].report
    if report is None or report.kind != "error" or any(rank.report != report for rank in ranks):
        return None
    return RankFailure(report.message, hint=report.hint, exit_code=report.exit_code, kind="error")
