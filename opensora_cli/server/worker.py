"""Processes that compute for a server: the planner, and workers that make videos alone or with a group of ranks.

Commands come from stdin and reports go to stdout, as JSON lines. A closed stdin means that the server is gone: the work
is saved, and the process ends.

A worker starts the ranks for its first video, and they keep the models loaded. Rank 0 takes the commands of the worker
from a pipe, and tells the other ranks. A video that is cancelled or fails ends the ranks, because they may be in
different places of it; the next video starts new ones.
"""

import _thread
import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

from pydantic import ValidationError

from opensora_cli.core.device import device_count
from opensora_cli.core.device_names import indexed, type_of_ranks
from opensora_cli.core.exceptions import OsoraError, RequestError
from opensora_cli.core.progress import Reporter, SilentReporter, StageProgress
from opensora_cli.core.ranks import RankContext, beat
from opensora_cli.core.signals import end_with_parent
from opensora_cli.engine.generate.dry_run import plan_generation
from opensora_cli.engine.generate.events import Hooks
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.ranks import Ranks
from opensora_cli.engine.generate.request import refined_with_mode
from opensora_cli.engine.generate.run import generate
from opensora_cli.engine.launch.launcher import LaunchRequest, launch, log_folder
from opensora_cli.engine.launch.process import RankFailure
from opensora_cli.engine.launch.rank import WatchedReporter, joined
from opensora_cli.server.results import write_extras
from opensora_cli.server.uploads import without_paths
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer, explain

_PIPE_VARIABLE = "OSORA_SERVER_PIPE"
"""Variable with the path of the pipe from which rank 0 takes its commands."""
_LOOK_S = 0.25
_IDLE_S = 5.0
"""Seconds between two signs of life of ranks that wait for a command."""
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


def main(kind: str, number: str | None = None) -> None:
    """Run a worker (`videos`) or the planner (`plans`) until the server is gone, or print the number of devices
    (`devices`). A worker uses the device, or the devices of the group, with this number if there are any.
    """
    end_with_parent()
    if kind == "devices":
        print(device_count())
        return
    reports, commands = Reports(), Commands(sys.stdin)
    try:
        if kind == "videos":
            _make_videos(commands, reports, None if number is None else int(number))
        else:
            _plan(commands, reports)
    except KeyboardInterrupt:
        sys.exit(130)


def _plan(commands: Commands, reports: Reports) -> None:
    while (command := commands.waiting.get()) is not None:
        notes = _Notes()
        try:
            plan = plan_generation(settings_of(command), reporter=notes)
            reports(event="plan", plan=plan.to_json(), lines=list(plan.lines()), notes=notes.texts)
        except Exception as error:
            reports(event="failed", error=failure(error))


class _Notes(SilentReporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


def _make_videos(commands: Commands, reports: Reports, number: int | None) -> None:
    own_device = indexed(number) if number is not None and device_count() else None
    with LoadedModels(stay=True) as models:
        while not commands.stopped.is_set() and (command := commands.waiting.get()) is not None:
            job_ids = [command["id"]]
            try:
                settings = settings_of(command)
                if settings.parallel.world_size > 1:
                    _make_in_ranks(command, settings, commands, reports, group=number, job_ids=job_ids)
                    continue
                make_video(
                    settings,
                    command,
                    models,
                    reports,
                    reporter=JobReporter(command["id"], reports),
                    device=own_device if settings.runtime.device == "auto" else None,
                    is_cancelled=partial(commands.is_cancelled, command["id"]),
                )
            except KeyboardInterrupt:
                reports(event="stopped", id=job_ids[-1])
            except Exception as error:
                if isinstance(error, RankFailure):
                    print("\n".join(filter(None, [error.message, error.hint])), file=sys.stderr, flush=True)
                    if not error.is_reported:
                        sys.exit(error.exit_code)  # the scheduler counts a worker that died
                reports(event="failed", id=job_ids[-1], error=failure(error))
            commands.cancelled.difference_update(job_ids)


def _make_in_ranks(
    command: Mapping[str, Any],
    settings: GenerateSettings,
    commands: Commands,
    reports: Reports,
    *,
    group: int | None,
    job_ids: list[str],
) -> None:
    """Start ranks, and give them a job and those after it, until one is cancelled or fails, or the server is gone.

    The IDs of the jobs after the first one are added to `job_ids`. `group` chooses the GPUs; None means the first ones.
    """
    parallel, kind = settings.parallel, type_of_ranks(settings.runtime.device)
    count = parallel.ranks_per_node
    if group is not None and kind != "cpu":
        parallel = parallel.replace({"devices": tuple(range(group * count, (group + 1) * count))})
    with (
        log_folder("serve") as folder,
        _relayed(commands, command, folder / "commands", job_ids=job_ids),
        reports.inherited(),
    ):
        request = LaunchRequest(parallel=parallel, gpus=count, device_type=kind, log_dir=folder)
        launch(request, ["serve", "--set", f"runtime.device={kind}"])


@contextmanager
def _relayed(commands: Commands, first: Mapping[str, Any], pipe: Path, *, job_ids: list[str]) -> Iterator[None]:
    """Write the first command and those that arrive to a new pipe during the block, and add their IDs to `job_ids`,
    which has that of the first. A command that ends the last job interrupts the main thread.
    """
    os.mkfifo(pipe, 0o600)
    os.environ[_PIPE_VARIABLE] = str(pipe)
    ended = threading.Event()

    def relay() -> None:
        # Opened for both, so that it does not wait for rank 0.
        with open(os.open(pipe, os.O_RDWR), "w", encoding="utf-8") as stream:
            print(json.dumps(first), file=stream, flush=True)
            while not ended.is_set():
                if commands.is_cancelled(job_ids[-1]):
                    _thread.interrupt_main()
                    return
                with suppress(Empty):
                    if (command := commands.waiting.get(timeout=_LOOK_S)) is not None:
                        job_ids.append(command["id"])
                        print(json.dumps(command), file=stream, flush=True)

    relaying = threading.Thread(target=relay)
    relaying.start()
    try:
        yield
    finally:
        ended.set()
        relaying.join()
        del os.environ[_PIPE_VARIABLE]


def make_in_rank(context: RankContext, base: Layer) -> None:
    """Be a rank of a group: make the videos of all commands, until the worker ends the rank.

    `base` names the type of its device. Raises RequestError if no worker has started the process, and what `generate`
    raises.
    """
    pipe = os.environ.pop(_PIPE_VARIABLE, None)
    if pipe is None:
        raise RequestError("a server starts its own ranks", hint="use osora serve --gpus N, without torchrun and srun")
    reports = Reports()
    with (
        open(pipe, encoding="utf-8") as stream,
        joined(context, device_type=str(base["runtime.device"].value)) as device,
        LoadedModels(stay=True, ranks=Ranks(device)) as models,
    ):
        while True:
            beat("wait for a command")
            command = models.ranks.same(_next_command(stream, reports) if context.is_main else None)
            if command is None:
                continue
            reporter = JobReporter(command["id"], reports) if context.is_main else SilentReporter()
            make_video(settings_of(command), command, models, reports, reporter=WatchedReporter(reporter))


def _next_command(stream: TextIO, reports: Reports) -> Mapping[str, Any] | None:
    """Return the next command, with the settings for all ranks; None if there is none yet, or its video failed."""
    if not select.select([stream], [], [], _IDLE_S)[0]:
        return None
    command = json.loads(stream.readline())
    reporter = JobReporter(command["id"], reports)
    try:
        settings = refined_with_mode(settings_of(command), reporter)
    except Exception as error:
        reports(event="failed", id=command["id"], error=failure(error))
        return None
    return {**command, "settings": settings.model_dump(mode="json")}


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
    report: Reports,
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

    def __init__(self, job_id: str, report: Reports) -> None:
        self.report = partial(report, id=job_id)
        self.before = 0.0
        """Percent of the finished stages."""

    def warn(self, text: str) -> None:
        self.report(event="warning", text=text)

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        share = _SHARES.get(name.split()[-1], 0)
        yield _Stage(self, share, {"stage": name, "total": total, "unit": unit})
        self.before = min(99.0, self.before + share)


class _Stage:
    def __init__(self, job: JobReporter, share: int, facts: Mapping[str, Any]) -> None:
        self._job, self._share, self._facts, self._before = job, share, facts, job.before
        self._done, self._since_s, self._sent_s = 0, time.monotonic(), 0.0
        self.advance(0)

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        now, total, share = time.monotonic(), self._facts["total"], self._share
        if now - self._sent_s < _EVERY_S and self._done not in (0, total):
            return
        self._sent_s = now
        part, eta_s = self._done / total if total else 0.0, None
        if part and share:
            whole_s = (now - self._since_s) / part
            eta_s = round(whole_s * (1 - part) + whole_s * (100 - self._before - share) / share)
        percent = min(99.0, self._before + share * part)
        progress = {**self._facts, "done": self._done, "percent": percent, "eta_s": eta_s}
        self._job.report(event="progress", progress=progress)


if __name__ == "__main__":
    main(*sys.argv[1:])
