"""Processes that compute for the server, which itself imports no torch."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from opensora_cli.core.python_processes import module_command, safe_environment

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
