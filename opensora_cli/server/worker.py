"""Processes that compute for a server: the planner, and workers that make videos alone or with a group of ranks.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any, TextIO

from opensora_cli.core.device import device_count
from opensora_cli.core.device_names import indexed, type_of_ranks
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.core.rank_link import beat
from opensora_cli.core.ranks import RankContext
from opensora_cli.core.signals import end_with_parent
from opensora_cli.engine.generate.dry_run import plan_generation
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.ranks import Ranks
from opensora_cli.engine.generate.request import refined_with_mode
from opensora_cli.engine.launch.launcher import LaunchRequest, launch, log_folder
from opensora_cli.engine.launch.process import RankFailure
from opensora_cli.engine.launch.rank import WatchedReporter, joined
from opensora_cli.server.making import Commands, JobReporter, Reports, failure, make_video, settings_of
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer

_PIPE_VARIABLE = "OSORA_SERVER_PIPE"
"""Variable with the path of the pipe from which rank 0 takes its commands."""
_LOOK_S = 0.25
_IDLE_S = 5.0
"""Seconds between two signs of life of ranks that wait for a command."""


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

    Args:
        command: the first job; `settings` are its settings.
        group: number of this group, each of which has GPUs of its own; None if there is one group.
        job_ids: ID of the first job, to which those of the others are added.
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


if __name__ == "__main__":
    main(*sys.argv[1:])
