"""Which checkpoint a run goes on from."""

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from opensora_cli.checkpoint.formats.colossal import TRAINING_FILE, all_epoch_folders
from opensora_cli.checkpoint.shared_folder import remove_unfinished, wrong_files
from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.train.strategy.distribution import Distribution

_ASIDE = "aside-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What to go on from.

    Args:
        folder: a checkpoint's; None: the newest of the run.
        allow_older: take the one before where the newest is broken.
    """

    folder: Path | None = None
    allow_older: bool = False


def checkpoints_to_try(output: Path, resume: Resume) -> list[Path]:
    """Return the checkpoints that a run may go on from, the newest first.

    Raises:
        CheckpointError: there is none, or the folder is of an earlier version of osora.
    """
    folders = all_epoch_folders(output) if output.is_dir() else []
    if resume.folder is not None:
        if not resume.folder.is_dir():
            raise CheckpointError(f"{resume.folder} is no folder of a checkpoint")
        # As the run calls it, however it was spelled: by that name it is found among the others.
        return [each for each in folders if each.samefile(resume.folder)] or [resume.folder]
    if not folders and (output / TRAINING_FILE).is_file():
        raise CheckpointError(
            f"{output / TRAINING_FILE} is of an earlier version of osora, which cannot be resumed from",
            hint=f"begin with its weights: osora ckpt convert {output / TRAINING_FILE} weights.safetensors, and then "
            "train with --set init=weights.safetensors --set output=FOLDER",
        )
    if not folders:
        raise CheckpointError(
            f"{output} has no checkpoint to resume from", hint="begin anew with --overwrite in place of --resume"
        )
    return folders if resume.allow_older else folders[:1]


def choose_checkpoint(output: Path, resume: Resume, *, distribution: Distribution, reporter: Reporter) -> Path:
    """Return the checkpoint to go on from, having compared its files with their hashes; the ranks share the work.

    Raises:
        CheckpointError: there is none, or it is broken.
    """
    folders = checkpoints_to_try(output, resume)
    for number, folder in enumerate(folders):
        problems = _problems(folder, distribution)
        if not problems:
            return folder
        older = all_epoch_folders(output)
        older = older[older.index(folder) + 1 :] if folder in older else []
        if number == len(folders) - 1:
            hint = None if resume.folder is not None else "begin anew with --overwrite in place of --resume"
            if older and not resume.allow_older:
                way = (
                    "--allow-older goes on from"
                    if resume.folder is None
                    else "go on from the one before: --resume-from"
                )
                hint = f"{way} {older[0]}"
            raise CheckpointError("\n".join([f"{folder} is broken:", *problems]), hint=hint)
        reporter.warn(f"{folder} is broken: {'; '.join(problems)}")
    raise AssertionError("there is at least one folder")


def put_aside_newer(output: Path, folder: Path, *, reporter: Reporter) -> None:
    """Rename the checkpoints that are newer than the one that a run goes on from: it will make others.

    Raises:
        OutputError: that is not possible.
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
        reporter.note(f"{each.name} is put aside as {aside}")


def _problems(folder: Path, distribution: Distribution) -> list[str]:
    """Return what is wrong with a checkpoint; all ranks get the same."""
    problems = wrong_files(folder, share=(distribution.rank, distribution.ranks))
    if distribution.ranks == 1:
        return problems
    found: list[list[str]] = [[] for _ in range(distribution.ranks)]
    dist.all_gather_object(found, problems)
    return sorted({problem for each in found for problem in each})
