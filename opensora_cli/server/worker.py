"""Processes that compute for a server: the worker keeps models loaded and makes videos, and the planner plans them.

They read commands from stdin and write reports to stdout, as one JSON document a line. A closed stdin means that the
server is gone: the work is saved, and the process ends.
"""

import sys
from functools import partial

from opensora_cli.core.device_names import indexed
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.core.signals import end_with_parent
from opensora_cli.server.processes import Commands, Reports, failure, settings_of


def main(kind: str, number: str | None = None) -> None:
    """Run a worker (`videos`) or the planner (`plans`) until the server is gone, or print the number of devices
    (`devices`). A worker uses the device, or the devices of the group, with this number if there are any.
    """
    end_with_parent()
    if kind == "devices":
        from opensora_cli.core.device import device_count

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


def _make_videos(commands: Commands, reports: Reports, number: int | None) -> None:
    from opensora_cli.core.device import device_count
    from opensora_cli.engine.generate.models import LoadedModels
    from opensora_cli.server.making import JobReporter, make_video
    from opensora_cli.server.ranks import make_in_ranks

    own_device = indexed(number) if number is not None and device_count() else None
    with LoadedModels(stay=True) as models:
        while not commands.stopped.is_set() and (command := commands.waiting.get()) is not None:
            job_id = command["id"]
            try:
                settings = settings_of(command)
            except RequestError as error:
                reports(event="failed", id=job_id, error=failure(error))
                continue
            if settings.parallel.world_size > 1:
                make_in_ranks(command, settings, commands, reports, group=number)
                continue
            try:
                make_video(
                    settings,
                    command,
                    models,
                    reports,
                    reporter=JobReporter(job_id, reports),
                    device=own_device if settings.runtime.device == "auto" else None,
                    is_cancelled=partial(commands.is_cancelled, job_id),
                )
            except KeyboardInterrupt:
                reports(event="stopped", id=job_id)
            except Exception as error:
                reports(event="failed", id=job_id, error=failure(error))
            commands.cancelled.discard(job_id)


def _plan(commands: Commands, reports: Reports) -> None:
    from opensora_cli.engine.generate.dry_run import plan_generation

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


if __name__ == "__main__":
    main(*sys.argv[1:])
