"""Videos of a server's jobs, made with models that stay loaded, and reports of their progress."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from opensora_cli.core.progress import Reporter, SilentReporter, StageProgress
from opensora_cli.engine.generate.events import Hooks
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.run import generate
from opensora_cli.server.processes import Report
from opensora_cli.server.results import write_extras
from opensora_cli.settings.generate import GenerateSettings

_EVERY_S = 0.25
"""Shortest time between two reports of one stage."""
_SHARES = {"load": 2, "text": 3, "encode": 5, "denoise": 75, "decode": 15}
"""Rough share of each stage in the time of a job, in percent."""


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

    result = generate(
        settings,
        reporter=reporter,
        models=models,
        device=device,
        hooks=Hooks(
            is_cancelled=is_cancelled,
            wants_state=state_due,
            on_preview=lambda path: report(event="preview", id=job["id"], path=path.name),
        ),
    )
    assert result is not None
    if models.ranks.is_main:
        path = result.videos[0].path
        write_extras(path, Path(job["folder"]))
        report(event="completed", id=job["id"], result={"path": str(path), "timings_s": result.timings_s})


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
