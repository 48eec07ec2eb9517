"""Launcher's view of one rank: its process, log file and reports."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships none

from opensora_cli.core.locks import open_regular
from opensora_cli.core.rank_link import CHANNEL_VARIABLE, FIRST_STAGE, TRACEBACK_SIGNAL, Heartbeat, RankReport
from opensora_cli.core.ranks import LOG_VARIABLE

_CHUNK = 2**16
_SHOW_CURSOR = "\x1b[?25h"


class RankProcess:
    """Process of a rank, started and watched by the launcher.

    Signs of work are progress reports, used processor time of the main thread, and bytes read and written. Processor
    time counts because a rank that is still importing, or is in a library that blocks other threads, cannot send
    messages.

    Rank 0 inherits stdout and stderr, so that its progress bars work. The other ranks print to their logs, which are
    overwritten and also get tracebacks. `environment` is complete. With `on_gpu`, processor time does not count in
    stages that compute on the device. `now` is the time of the launcher.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        on_gpu: bool = False,
        now: float = 0.0,
    ) -> None:
        self.rank, self.log = rank, log
        self.state = Heartbeat()
        self.report: RankReport | None = None
        self.left: str | None = None
        self.stopped_s = self.idle_s = self.still_s = 0.0
        """Seconds for which the rank is stopped, gives no sign of work, and makes no progress."""
        self._on_gpu = on_gpu
        self._signs: tuple[int, object] = (0, None)
        self._running_at = self._worked_at = self._moved_at = now
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
        """ID of the process, which leads its own process group."""
        return self._process.pid

    @property
    def is_idle(self) -> bool:
        """Whether the rank has given no sign of work for too long. This is no error if it waits for a working rank."""
        return self.idle_s >= self.state.idle_s

    @property
    def is_late(self) -> bool:
        """Whether a step takes too long, even if the rank works."""
        return self.state.late_s is not None and self.still_s >= self.state.late_s

    @property
    def has_begun(self) -> bool:
        """Whether the rank has reported a stage."""
        return self.state.stage != FIRST_STAGE

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs. Remaining child processes are killed."""
        if self._code is None:
            self._code = self._process.poll()
            if self._code is not None:
                self._signal_group(signal.SIGKILL)
        return self._code

    def listen(self) -> None:
        """Receive the messages of the rank since the last call."""
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

    def look(self, now: float) -> None:
        """Receive messages, and look for signs of work."""
        self.listen()
        moves, work = self.state.moves, None if self._on_gpu and self.state.on_device else self._work()
        if moves != self._signs[0]:
            self._moved_at = now
        if (moves, work) != self._signs:
            self._worked_at = now
        self._signs = moves, work
        if not self.is_stopped():
            self._running_at = now
        self.stopped_s, self.idle_s = now - self._running_at, now - self._worked_at
        self.still_s = now - self._moved_at

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by a signal."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def log_traceback(self) -> None:
        """Let a running rank write its traceback to its log."""
        if TRACEBACK_SIGNAL is not None and self.has_begun and self.exit_code() is None:
            self._process.send_signal(TRACEBACK_SIGNAL)

    def interrupt(self) -> None:
        """Send SIGINT to the rank only, which then ends its child processes.

        A rank that has not yet begun is killed: it has nothing to save, and would print a traceback.
        """
        self.listen()
        if not self.has_begun:
            self.kill()
        elif self.exit_code() is None:
            self._process.send_signal(signal.SIGINT)

    def terminate(self) -> None:
        """Send SIGTERM to the rank and its child processes, unless it has ended."""
        if self.exit_code() is None:
            self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the rank and its child processes."""
        if self.exit_code() is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()

    def last_line(self) -> str | None:
        """Return the last line of the log that is not blank."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 4096))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), None)

    def close(self) -> None:
        """Close the link, after the end of the process."""
        self._channel.close()
        if self.rank == 0 and sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(_SHOW_CURSOR)  # a rank that is killed during its progress bar leaves the cursor hidden

    def _signal_group(self, number: int) -> None:
        # macOS refuses if the group contains only ended processes.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _work(self) -> object:
        """Return the processor time and major faults of the main thread, and what all threads read and wrote."""
        try:
            process = psutil.Process(self.pid)
            if sys.platform != "linux":
                # Of all threads: whole seconds hide the little that heartbeats use.
                return int(sum(process.cpu_times()[:2]))
            # The name of the program, in parentheses, may have spaces and parentheses too.
            fields = Path(f"/proc/{self.pid}/task/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
            disk = process.io_counters()
            # Mapped files are read by major faults.
            return fields[9], fields[11], fields[12], disk.read_bytes, disk.write_bytes
        except (OSError, IndexError, psutil.Error):
            return None
