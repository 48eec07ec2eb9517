"""The work of the processes that compute for a server: commands, reports, and videos with models that stay loaded.

Commands come from stdin and reports go to stdout, as JSON lines. A closed stdin means that the server is gone: the work
is saved, and the process ends.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from pydantic import ValidationError

from opensora_cli.core.exceptions import OsoraError, RequestError
from opensora_cli.core.progress import Reporter, SilentReporter, StageProgress
from opensora_cli.engine.generate.events import Hooks
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.run import generate
from opensora_cli.server.results import write_extras
from opensora_cli.server.uploads import without_paths
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import explain

Report = Callable[..., None]

_EVERY_S = 0.25
"""Shortest time between two reports of one stage."""
_SHARES = {"load": 2, "text": 3, "encode": 5, "denoise": 75, "decode": 15}
"""Rough share of each stage in the time of a job, in percent."""


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
        """Send a report, whose texts name no folder."""
        with self._sending:
            try:
                print(json.dumps(without_paths(fields)), file=self._file, flush=True)
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


def make_video(
    settings: GenerateSettings,
    job: Mapping[str, Any],
    models: LoadedModels,
    report: Report,
    *,
    reporter: Reporter,
    device: str | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Make the video of a job, and report it as completed.

    The state is saved every `job["save_every"]` seconds of work. Ranks of `models` call this together, and rank 0
    reports. `device` is that of a process that makes videos beside others. Raises what `generate` raises.
    """
    saved_s = time.monotonic()

    def state_due() -> bool:
        nonlocal saved_s
        is_due = time.monotonic() - saved_s >= float(job["save_every"])
        if is_due:
            saved_s = time.monotonic()
        return is_due

    def on_preview(path: Path) -> None:
        report(event="preview", id=job["id"], path=path.name)

    hooks = Hooks(is_cancelled=is_cancelled, wants_state=state_due, on_preview=on_preview)
    result = generate(settings, reporter=reporter, models=models, device=device, hooks=hooks)
    assert result is not None
    if models.ranks.is_main:
        write_extras(result.videos[0].path, Path(job["folder"]))
        report(event="completed", id=job["id"], timings_s=result.timings_s)


class JobReporter(SilentReporter):
    """Reporter that sends the progress of a job, at most a few times a second."""

    def __init__(self, job_id: str, report: Report) -> None:
        self._id, self._report = job_id, report
        self._before = 0.0
        """Percent of the finished stages."""

    def warn(self, text: str) -> None:
        """Send a warning."""
        self._report(event="warning", id=self._id, text=text)

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Send the progress of a stage."""
        share, before = _SHARES.get(name.split()[-1], 0), self._before

        def send(done: int, elapsed_s: float) -> None:
            part, eta_s = done / total if total else 0.0, None
            if part and share:
                whole_s = elapsed_s / part
                eta_s = round(whole_s * (1 - part) + whole_s * (100 - before - share) / share)
            percent = min(99.0, before + share * part)
            progress = {"stage": name, "total": total, "unit": unit, "done": done, "percent": percent, "eta_s": eta_s}
            self._report(event="progress", id=self._id, progress=progress)

        yield _Stage(send, total)
        self._before = min(99.0, before + share)


class _Stage:
    def __init__(self, send: Callable[[int, float], None], total: int | None) -> None:
        self._send, self._total = send, total
        self._done, self._since_s, self._sent_s = 0, time.monotonic(), 0.0
        self.advance(0)

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._sent_s >= _EVERY_S or self._done in (0, self._total):
            self._sent_s = now
            self._send(self._done, now - self._since_s)
