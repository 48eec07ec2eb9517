"""Folder of a run: the checkpoint to resume from, its effects on settings, and files that do not belong to the run."""

from pathlib import Path

from opensora_cli.checkpoint.formats.colossal import SETTINGS_FILE, all_epoch_folders
from opensora_cli.checkpoint.shared_folder import remove_checkpoint, remove_unfinished, wrong_files
from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.core.files import write_json_atomic
from opensora_cli.core.progress import Reporter
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.core.threads import ThreadChoice
from opensora_cli.engine.train.checkpoints import remove_old
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.early import Resume, checkpoints_to_try
from opensora_cli.engine.train.metrics import remove_records, truncate_records
from opensora_cli.engine.train.plan import TrainPlan
from opensora_cli.engine.train.state import read_running_states
from opensora_cli.settings.train import TrainSettings

_ASIDE = "aside-"


def choose_checkpoint(output: Path, resume: Resume, *, distribution: Distribution, reporter: Reporter) -> Path:
    """Return the checkpoint to resume from. The ranks together compare its files with their hashes.

    Raises CheckpointError if there is none, or if it is broken.
    """
    folders = checkpoints_to_try(output, resume)
    for number, folder in enumerate(folders):
        problems = _problems(folder, distribution)
        if not problems:
            return folder
        older = all_epoch_folders(output)
        older = older[older.index(folder) + 1 :] if folder in older else []
        if number == len(folders) - 1:
            hint = None if resume.folder is not None else "start again with --overwrite in place of --resume"
            if older and not resume.allow_older:
                way = "--allow-older resumes from" if resume.folder is None else "use the one before: --resume-from"
                hint = f"{way} {older[0]}"
            raise CheckpointError("\n".join([f"{folder} is broken:", *problems]), hint=hint)
        reporter.warn(f"{folder} is broken: {'; '.join(problems)}")
    raise AssertionError("there is at least one folder")


def prepare_output(
    plan: TrainPlan, settings: TrainSettings, folder: Path | None, *, step: int, reporter: Reporter
) -> None:
    """Remove or rename files in the run's folder that do not belong to a run from `step` on; write its settings.

    `folder` is the checkpoint that the run resumes from. Raises FileProblem if this is not possible.
    """
    remove_unfinished(plan.output)
    if folder is not None:
        set_aside_newer(plan.output, folder, reporter=reporter)
        truncate_records(plan.output, step=step)
        # An earlier run may have ended before it removed old checkpoints.
        remove_old(plan.output, settings.checkpoints)
    elif plan.overwrite:
        for each in all_epoch_folders(plan.output) if plan.output.is_dir() else ():
            remove_checkpoint(each)
        remove_records(plan.output)
    write_json_atomic(plan.output / SETTINGS_FILE, settings.model_dump(mode="json"))


def set_aside_newer(output: Path, folder: Path, *, reporter: Reporter) -> None:
    """Rename the checkpoints that are newer than `folder` because the resumed run will write its own.

    Raises OutputError if this is not possible.
    """
    remove_unfinished(output)
    folders = all_epoch_folders(output)
    newer = folders[: folders.index(folder)] if folder in folders else folders
    for each in newer:
        aside = each.with_name(f"{_ASIDE}{each.name}")
        try:
            number = 1
            while aside.exists():
                number += 1
                aside = each.with_name(f"{_ASIDE}{number}-{each.name}")
            each.rename(aside)
        except OSError as error:
            raise OutputError(f"cannot rename {each}: {error.strerror or error}") from error
        reporter.note(f"{each.name} is renamed to {aside}")


def _problems(folder: Path, distribution: Distribution) -> list[str]:
    """Return the problems of a checkpoint, the same on all ranks."""
    problems = wrong_files(folder, share=(distribution.rank, distribution.ranks))
    if distribution.ranks == 1:
        return problems
    return sorted({problem for each in all_gather_json(problems) for problem in each})


def with_recorded_threads(threads: ThreadChoice, folder: Path, *, reporter: Reporter) -> ThreadChoice:
    """Return the number of threads of the checkpoint's run because sums depend on it, unless a user chose a number."""
    recorded = read_running_states(folder).threads
    if recorded is None or recorded == threads.count:
        return threads
    if threads.is_free:
        return ThreadChoice(count=recorded, reason="as the run began, for the same sums")
    reporter.warn(
        f"the run had {recorded} threads, and from now on {threads.line()}: results match up to rounding; "
        f"with --threads {recorded} they are bitwise identical"
    )
    return threads


def with_recorded_micro_batches(
    settings: TrainSettings, folder: Path, *, data_ranks: int, reporter: Reporter
) -> TrainSettings:
    """Return the settings with the number of micro-batches of the checkpoint's run, unless the settings name another.

    Raises RequestError if the ranks cannot share that number.
    """
    recorded = read_running_states(folder).micro_batches
    chosen = settings.loop.micro_batches
    if recorded is None:
        return settings
    if chosen is not None:
        if chosen != recorded:
            reporter.warn(f"an update has {chosen} micro-batches from now on, instead of {recorded}")
        return settings
    if recorded % data_ranks:
        least = -(-recorded // data_ranks) * data_ranks
        raise RequestError(
            f"{folder} is of a run with loop.micro_batches={recorded}, which {data_ranks} data-parallel ranks cannot "
            "share",
            hint=f"use a number of ranks that divides {recorded}, or larger updates from now on: "
            f"--set loop.micro_batches={least}",
        )
    if recorded == data_ranks:
        return settings
    reporter.warn(f"loop.micro_batches={recorded}, as the run began, not {data_ranks}")
    return settings.replace({"loop.micro_batches": recorded})
