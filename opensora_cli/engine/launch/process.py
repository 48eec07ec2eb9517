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

from opensora_cli.core.rank_link import CHANNEL_VARIABLE, FIRST_STAGE, OwnTime, Pulse, RankReport
from opensora_cli.core.ranks import LOG_VARIABLE
from opensora_cli.core.regular_files import open_regular

_CHUNK = 2**16
_SHOW_CURSOR = "\x1b[?25h"


class RankProcess:
    """Process of a rank, started and watched by the launcher.

    A sign of life is a message or used processor time. Processor time counts because a rank that is still importing, or
    is in a library that blocks other threads, cannot send messages: it is busy, not frozen.

    Rank 0 inherits stdout and stderr, so that its progress bars work. The other ranks print to their logs, which are
    overwritten and also get tracebacks. `environment` is complete, and `own_time` is the clock of the launcher.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path, *, own_time: OwnTime
    ) -> None:
        self.rank = rank
        self.log = log
        self.stage = FIRST_STAGE
        self.report: RankReport | None = None
        self.left: str | None = None
        self.pulse = Pulse()
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        self._unread = b""
        with theirs:
            try:
                self._process = self._start(command, environment, theirs)
            except BaseException:
                self.close()
                raise
        self._code: int | None = None
        self._cpu_s = 0.0
        self._time = own_time
        self._last_sign = own_time.now()

    @property
    def pid(self) -> int:
        """ID of the process, which leads its own process group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs. Remaining child processes are killed."""
        if self._code is None:
            self._code = self._process.poll()
            if self._code is not None:
                self._kill_group()
        return self._code

    def listen(self) -> None:
        """Receive the messages of the rank since the last call."""
        before = self._unread
        with suppress(BlockingIOError, ConnectionError):
            while chunk := self._channel.recv(_CHUNK):
                self._unread += chunk
        if self._unread != before:
            self._last_sign = self._time.now()
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.stage = message.get("stage", self.stage)
            if "pulse" in message:
                self.pulse = Pulse(**message["pulse"])
            self.left = message.get("left", self.left)
            if "report" in message and self.report is None:
                self.report = RankReport(**message["report"])

    def silent_s(self) -> float:
        """Return the seconds since the last sign of life."""
        with suppress(psutil.Error):
            times = psutil.Process(self.pid).cpu_times()
            if times.user + times.system != self._cpu_s:
                self._cpu_s = times.user + times.system
                self._last_sign = self._time.now()
        return self._time.now() - self._last_sign

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by a signal."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def has_begun(self) -> bool:
        """Return whether the rank has reported a stage."""
        return self.stage != FIRST_STAGE

    def interrupt(self) -> None:
        """Send SIGINT to the rank only, which then ends its child processes.

        A rank that has not yet begun is killed: it has nothing to save, and would print a traceback.
        """
        self.listen()
        if not self.has_begun():
            self.kill()
        elif self.exit_code() is None:
            self._process.send_signal(signal.SIGINT)

    def terminate(self) -> None:
        """Send SIGTERM to the rank and its child processes, unless it has ended."""
        if self.exit_code() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the rank and its child processes."""
        if self.exit_code() is None:
            self._kill_group()
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

    def _kill_group(self) -> None:
        # macOS refuses if the group contains only ended processes.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], theirs: socket.socket
    ) -> "subprocess.Popen[bytes]":
        # The rank's link also writes to the log: both append.
        with open(self.log, "ab", opener=open_regular) as log:
            log.truncate(0)
            os.fchmod(log.fileno(), 0o600)
            output = None if self.rank == 0 else log
            return subprocess.Popen(
                command,
                env={**environment, LOG_VARIABLE: str(self.log.absolute()), CHANNEL_VARIABLE: str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                # Ctrl-C at the terminal goes to the launcher, which forwards it.
                start_new_session=True,
            )
