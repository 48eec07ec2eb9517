"""Both sides of the processes that compute for the server, which itself imports no torch.

The server writes commands to their stdin, and reads reports from their stdout, as JSON lines.
"""

import asyncio
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from pydantic import ValidationError

from opensora_cli.core.exceptions import OsoraError, RequestError
from opensora_cli.core.python_processes import module_command, safe_environment
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import explain

Report = Callable[..., None]

_PART = r"[^\s/:,;'\"()<>]+"
# Names of folders may contain blanks; only before the last slash, they can be distinguished from words.
_PATH = re.compile(rf"(?<![\w/<>.@-])(?:~|\.\.?)?(?:/{_PART}(?: {_PART})*(?=/))*/{_PART}/?")
_REFERENCE = re.compile(r"reference_(\d+)_[0-9a-f]{8}\.\w+")
_LONGEST_LINE = 16 * 2**20
_STOP_S = 120.0
"""Seconds that a process may take to finish its step and to save its state."""


def without_paths(document: Any) -> Any:
    """Return a JSON value whose texts name no folder of the server: files keep their names, and uploads are counted."""
    if isinstance(document, dict):
        return {name: without_paths(each) for name, each in document.items()}
    if isinstance(document, list):
        return [without_paths(each) for each in document]
    if not isinstance(document, str):
        return document
    text = _PATH.sub(lambda match: Path(match[0]).name, document.replace("file://", ""))
    return _REFERENCE.sub(lambda match: f"reference {int(match[1]) + 1}", text)


class Process:
    """A process of `server.worker` that is started once; it ends with the server."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *words: str) -> "Process":
        """Start a process for `words`: `videos`, perhaps with the number of a device, or `plans`."""
        return cls(
            await asyncio.create_subprocess_exec(
                *module_command("opensora_cli.server.worker"),
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=safe_environment(os.environ),
                limit=_LONGEST_LINE,
                # Ctrl-C in a terminal reaches the server alone, which then stops the worker.
                start_new_session=True,
            )
        )

    async def send(self, **command: Any) -> None:
        """Send a command. A process that has ended ignores it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            await self._process.stdin.drain()

    async def reports(self) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the reports of the process until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield without_paths(json.loads(line))

    async def ended(self) -> int:
        """Wait for the end of the process, and return its exit code; that of a signal is negative."""
        return await self._process.wait()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.returncode is not None

    def kill(self) -> None:
        """End the process at once."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Let the process finish its step, save its state and end; kill it if that takes too long."""
        await self.send(do="stop")
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()


class Commands:
    """Commands that arrive while the process works."""

    def __init__(self, stream: TextIO) -> None:
        self.waiting: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        """Commands to carry out in turn. None: the server is gone."""
        self.stopped = threading.Event()
        """Whether the running job should save its state and end."""
        self.cancelled: set[str] = set()
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: TextIO) -> None:
        for line in stream:
            command = json.loads(line)
            if command["do"] == "cancel":
                self.cancelled.add(command["id"])
            elif command["do"] == "stop":
                break
            else:
                self.waiting.put(command)
        self.stopped.set()
        self.waiting.put(None)

    def is_cancelled(self, job_id: str) -> bool:
        """Return whether the running job should end."""
        return self.stopped.is_set() or job_id in self.cancelled


class Reports:
    """Reports of this process, which may come from several threads. What libraries print on stdout goes to stderr."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._sending = threading.Lock()

    def __call__(self, **fields: Any) -> None:
        """Send a report."""
        with self._sending:
            try:
                print(json.dumps(fields), file=self._file, flush=True)
            except BrokenPipeError:  # the server is gone
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """Let processes that are started in the block send reports by their stdout."""
        os.dup2(self._file.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(2, 1)


def settings_of(command: Mapping[str, Any]) -> GenerateSettings:
    """Return the settings of a job. Raises RequestError if this version cannot read them."""
    try:
        return GenerateSettings.model_validate(command["settings"])
    except ValidationError as error:
        hint = "another version of osora took the request: send it again"
        raise RequestError("; ".join(explain(error)), hint=hint) from error


def failure(error: Exception) -> dict[str, Any]:
    """Return an error as the server reports it: code, message, hint and the exit code of the command line."""
    if isinstance(error, OsoraError):
        code, message, hint = type(error).__name__, error.message, error.hint
        return {"code": code, "message": message, "hint": hint, "exit_code": error.exit_code}
    # A bug keeps its traceback, in the log of the server.
    print(without_paths("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
    return {"code": "internal_error", "message": f"{type(error).__name__}: {error}", "hint": None, "exit_code": 1}
