"""Processes that compute for a server: the worker keeps models loaded and makes videos, and the planner plans them.

They read commands from stdin and write reports to stdout, as one JSON document a line. A closed stdin means that the
server is gone: the work is saved, and the process ends.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from opensora_cli.core.device_names import indexed
from opensora_cli.core.exceptions import OsoraError
from opensora_cli.core.progress import SilentReporter, StageProgress
from opensora_cli.core.signals import end_with_parent
from opensora_cli.server.processes import without_paths
from opensora_cli.settings.generate import GenerateSettings

_EVERY_S = 0.25
"""Shortest time between two reports of one stage."""
STATE_EVERY_S = float(os.environ.get("OSORA_SERVER_STATE_S", "30"))
"""Seconds of work between two saves of a job's state."""
_SHARES = {"load": 2, "text": 3, "encode": 5, "denoise": 75, "decode": 15}
"""Rough share of each stage in the time of a job, in percent."""

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
        share = _SHARES.get(name.split()[-1], 0)
        send = partial(self._report, event="progress", id=self._id)
        yield _Stage(send, {"stage": name, "total": total, "unit": unit}, before=self._before, share=share)
        self._before = min(99.0, self._before + share)


class _Stage:
    """Progress of a stage that takes `share` percent of a job's time, after `before` percent."""

    def __init__(self, send: Report, named: Mapping[str, Any], *, before: float, share: int) -> None:
        self._send, self._named, self._before, self._share = send, named, before, share
        self._done, self._since_s, self._sent_s = 0, time.monotonic(), 0.0
        self.advance(0)

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        now, total = time.monotonic(), self._named["total"]
        if now - self._sent_s < _EVERY_S and self._done not in (0, total):
            return
        self._sent_s = now
        part, eta_s = self._done / total if total else 0.0, None
        if part and self._share:
            whole_s = (now - self._since_s) / part
            eta_s = round(whole_s * (1 - part) + whole_s * (100 - self._before - self._share) / self._share)
        percent = min(99.0, self._before + self._share * part)
        self._send(progress={**self._named, "done": self._done, "percent": percent, "eta_s": eta_s})


def main(kind: str, number: str | None = None) -> None:
    """Run a worker (`videos`) or the planner (`plans`) until the server is gone, or print the number of devices
    (`devices`). A worker uses the device with this number if there is one.
    """
    end_with_parent()
    if kind == "devices":
        from opensora_cli.core.device import device_count

        print(device_count())
        return
    # What libraries print must not mix with the reports.
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()

    def report(**fields: Any) -> None:
        with lock:
            try:
                print(json.dumps(fields), file=reports, flush=True)
            except BrokenPipeError:  # the server is gone
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    commands = Commands(sys.stdin)
    try:
        if kind == "videos":
            _make_videos(commands, report, number)
        else:
            _plan(commands, report)
    except KeyboardInterrupt:
        sys.exit(130)


def _make_videos(commands: Commands, report: Report, number: str | None) -> None:
    from opensora_cli.core.device import device_count
    from opensora_cli.engine.generate.models import LoadedModels
    from opensora_cli.server.results import write_extras

    own_device = indexed(int(number)) if number is not None and device_count() else None
    with LoadedModels(stay=True) as models:
        while (command := commands.waiting.get()) is not None:
            job_id, folder = command["id"], Path(command["folder"])
            try:
                settings = GenerateSettings.model_validate(command["settings"])
                device = own_device if settings.runtime.device == "auto" else None
                result = _generate(settings, job_id, models, device, commands, report)
                write_extras(Path(result["path"]), folder)
                report(event="completed", id=job_id, result=result)
            except KeyboardInterrupt:
                report(event="stopped", id=job_id)
            except Exception as error:
                report(event="failed", id=job_id, error=failure(error))
            commands.cancelled.discard(job_id)


def _generate(
    settings: GenerateSettings, job_id: str, models: Any, device: str | None, commands: Commands, report: Report
) -> dict[str, Any]:
    from opensora_cli.engine.generate import run
    from opensora_cli.engine.generate.events import Hooks

    saved_s = time.monotonic()

    def state_due() -> bool:
        nonlocal saved_s
        is_due = time.monotonic() - saved_s >= STATE_EVERY_S
        if is_due:
            saved_s = time.monotonic()
        return is_due

    result = run.generate(
        settings,
        reporter=JobReporter(job_id, report),
        models=models,
        device=device,
        hooks=Hooks(
            is_cancelled=lambda: commands.is_cancelled(job_id),
            wants_state=state_due,
            on_preview=lambda path: report(event="preview", id=job_id, path=path.name),
        ),
    )
    assert result is not None
    return {"path": str(result.videos[0].path), "timings_s": result.timings_s}


def _plan(commands: Commands, report: Report) -> None:
    from opensora_cli.engine.generate.dry_run import plan_generation

    while (command := commands.waiting.get()) is not None:
        notes = _Notes()
        try:
            plan = plan_generation(GenerateSettings.model_validate(command["settings"]), reporter=notes)
            report(event="plan", id=command["id"], plan=plan.to_json(), lines=list(plan.lines()), notes=notes.texts)
        except Exception as error:
            report(event="failed", id=command["id"], error=failure(error))


class _Notes(SilentReporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


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


if __name__ == "__main__":
    main(*sys.argv[1:])
