"""Channel of a process that computes for a server: commands from stdin, and reports to stdout, as JSON lines."""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TextIO

from pydantic import ValidationError

from opensora_cli.core.exceptions import OsoraError, RequestError
from opensora_cli.server.processes import without_paths
from opensora_cli.settings.explain import explain
from opensora_cli.settings.generate import GenerateSettings

Report = Callable[..., None]


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
        return {
            "code": type(error).__name__,
            "message": error.message,
            "hint": error.hint,
            "exit_code": error.exit_code,
        }
    # A bug keeps its traceback, in the log of the server.
    print(without_paths("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
    return {"code": "internal_error", "message": f"{type(error).__name__}: {error}", "hint": None, "exit_code": 1}
