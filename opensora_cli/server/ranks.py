"""Groups of ranks that make each video of a server together.

The worker of a group starts the ranks for its first video, and they keep the models loaded. Rank 0 takes the commands
of the worker from a pipe, and tells the other ranks. A video that is cancelled or fails ends the ranks, because they
may be in different places of it; the next video starts new ones.
"""

import _thread
import json
import os
import select
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty
from typing import Any, TextIO

from opensora_cli.core.device_names import type_of_ranks
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.core.rank_link import beat
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.ranks import Ranks
from opensora_cli.engine.generate.request import refined_with_mode
from opensora_cli.engine.launch.launcher import LaunchRequest, launch, log_folder
from opensora_cli.engine.launch.process import RankFailure
from opensora_cli.engine.launch.rank import WatchedReporter, joined
from opensora_cli.server.making import JobReporter, make_video
from opensora_cli.server.processes import Commands, Reports, failure, settings_of
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer

_PIPE_VARIABLE = "OSORA_SERVER_PIPE"
"""Variable with the path of the pipe from which rank 0 takes its commands."""
_LOOK_S = 0.25
_IDLE_S = 5.0
"""Seconds between two signs of life of ranks that wait for a command."""


def make_in_ranks(
    command: Mapping[str, Any], settings: GenerateSettings, commands: Commands, reports: Reports, *, group: int | None
) -> None:
    """Start ranks, and give them a job and those after it, until one is cancelled or fails, or the server is gone.

    Args:
        command: the first job; `settings` are its settings.
        group: number of this group, each of which has GPUs of its own; None if there is one group.

    Raises:
        RankFailure: a rank was killed, crashed or hung.
    """
    parallel, kind = settings.parallel, type_of_ranks(settings.runtime.device)
    count = parallel.ranks_per_node
    if group is not None and kind != "cpu":
        parallel = parallel.replace({"devices": tuple(range(group * count, (group + 1) * count))})
    job_ids = [command["id"]]
    try:
        with (
            log_folder("serve") as folder,
            _relayed(commands, command, folder / "commands", job_ids=job_ids),
            reports.inherited(),
        ):
            request = LaunchRequest(parallel=parallel, gpus=count, device_type=kind, log_dir=folder)
            launch(request, ["serve", "--set", f"runtime.device={kind}"])
    except KeyboardInterrupt:
        reports(event="stopped", id=job_ids[-1])
    except Exception as error:
        if isinstance(error, RankFailure):
            if not error.is_reported:
                raise
            print("\n".join(filter(None, [error.message, error.hint])), file=sys.stderr, flush=True)
        reports(event="failed", id=job_ids[-1], error=failure(error))


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
