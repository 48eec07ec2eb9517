"""One rank as its launcher sees it: a process, its log file, and what it told."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships none

from opensora_cli.core.rank_link import CHANNEL_VARIABLE, Pulse, RankReport
from opensora_cli.core.ranks import LOG_VARIABLE
from opensora_cli.engine.launch.terminal import CopiedStream

_CHUNK = 2**16


class RankProcess:
    """Starts a rank and watches it.

    A sign of life is a message or used processor time. The latter counts since a rank that is still importing, or in a
    library that lets no other thread run, cannot send anything: it is busy, not frozen.

    Args:
        rank: its number in the whole run.
        command: what to run, with its arguments.
        environment: all of it.
        log: its log file, written anew. stdout and stderr go there; those of rank 0 to ours, too.
    """

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.rank = rank
        self.log = log
        self.stage = "start"
        self.report: RankReport | None = None
        self.pulse = Pulse()
        self._outputs: list[CopiedStream] = []
        self._open = ExitStack()
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        self._unread = b""
        with theirs, ExitStack() as undo:
            undo.callback(self.close)
            self._process = self._start(command, environment, theirs)
            undo.pop_all()
        self._code: int | None = None
        self._cpu_s = 0.0
        self._last_sign = time.monotonic()

    @property
    def pid(self) -> int:
        """Of the process, which also leads a process group of its own."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs. What it left running is ended."""
        if self._code is None:
            self._code = self._process.poll()
            if self._code is not None:
                self._kill_group()
        return self._code

    def listen(self) -> None:
        """Take what the rank told since the last time."""
        before = self._unread
        with suppress(BlockingIOError, ConnectionError):
            while chunk := self._channel.recv(_CHUNK):
                self._unread += chunk
        if self._unread != before:
            self._last_sign = time.monotonic()
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            told = json.loads(line)
            self.stage = told.get("stage", self.stage)
            if "pulse" in told:
                self.pulse = Pulse(**told["pulse"])
            if "report" in told and self.report is None:
                self.report = RankReport(**told["report"])

    def silent_s(self) -> float:
        """Return the seconds since the last sign of life."""
        with suppress(psutil.Error):
            times = psutil.Process(self.pid).cpu_times()
            if times.user + times.system != self._cpu_s:
                self._cpu_s = times.user + times.system
                self._last_sign = time.monotonic()
        return time.monotonic() - self._last_sign

    def forgive(self) -> None:
        """Forget how long it has been silent, since nobody listened."""
        self._last_sign = time.monotonic()

    def is_stopped(self) -> bool:
        """Whether the process is stopped by a signal."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank and to all it started, unless it has ended."""
        if self.exit_code() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def interrupt(self) -> None:
        """Do what Ctrl-C does: to the rank alone, which then ends what it started."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGINT)

    def mute(self) -> None:
        """Show no more of what it prints."""
        for output in self._outputs:
            output.mute()

    def kill(self) -> None:
        """End the rank and all that it started."""
        if self.exit_code() is None:
            self._kill_group()
            self._process.wait()

    def last_line(self) -> str | None:
        """Return the last line of the log that says something."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 4096))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), None)

    def close(self) -> None:
        """Close the link and the log, after the end of the process."""
        self._channel.close()
        self._open.close()

    def _kill_group(self) -> None:
        # macOS refuses where only a process that has ended is left.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], theirs: socket.socket
    ) -> "subprocess.Popen[bytes]":
        self.log.write_bytes(b"")
        # Several write to it: each appends.
        log = self._open.enter_context(self.log.open("ab", buffering=0))
        stdout = stderr = log.fileno()
        if self.rank == 0:
            self._outputs = [
                self._open.enter_context(CopiedStream(_descriptor(stream), log)) for stream in (sys.stdout, sys.stderr)
            ]
            stdout, stderr = (output.end for output in self._outputs)
        process = subprocess.Popen(
            command,
            env={**environment, LOG_VARIABLE: str(self.log.absolute()), CHANNEL_VARIABLE: str(theirs.fileno())},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
            # Ctrl-C at the terminal is for the launcher, which hands it on.
            start_new_session=True,
        )
        for output in self._outputs:
            output.start()
        return process


def _descriptor(stream: object) -> int:
    """Return the file descriptor of a standard stream, -1 where it is closed or has none."""
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]  # None, or whatever a caller put there
    except (AttributeError, OSError, ValueError):
        return -1
