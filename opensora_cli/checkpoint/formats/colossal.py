"""The layout of folders that trainings and downloads leave."""

import re
from pathlib import Path
from typing import Any

from opensora_cli.checkpoint.readable import visible_files
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.reading import read_json_object, require_schema
from opensora_cli.core.weight_choices import Selection

TRAINING_FILE = "checkpoint.pt"
"""What runs of `osora train` kept in their folder before they had checkpoints of their own."""

SETTINGS_FILE = "settings.json"
"""What a run of `osora train` keeps in its folder beside its checkpoints."""

MODEL_FOLDER = "model"
EMA_FILE = "ema.safetensors"
MASTER_FILE = "master.safetensors"
OPTIMIZER_FOLDER = "optimizer"
RUNNING_STATES_FILE = "running_states.json"
"""Written last: without it, a folder with more than `model/` is of a saving that was interrupted."""
RUNNING_STATES_SCHEMA = "osora.running-states/1"

_PARTS = {
    Selection.MODEL: (MODEL_FOLDER,),
    Selection.EMA: (EMA_FILE, "ema.pt"),
    Selection.MASTER: (MASTER_FILE, "master.pt"),
}
_EPOCH_FOLDER = re.compile(r"epoch(\d+)-global_step(\d+)")


def checkpoint_folder_name(*, epoch: int, global_step: int) -> str:
    """Return what ColossalAI's folders are called: of an epoch, counted from 0, after so many updates."""
    return f"epoch{epoch}-global_step{global_step}"


def epoch_folders(run: Path) -> list[Path]:
    """Return the checkpoints in the folder of a run that were written to their end, newest first."""
    return [folder for folder in all_epoch_folders(run) if is_complete(folder)]


def all_epoch_folders(run: Path) -> list[Path]:
    """Return the folders with the names of checkpoints, newest first, whether they were written to their end or not."""
    found = []
    for folder in visible_files(run):
        match = _EPOCH_FOLDER.fullmatch(folder.name)
        if match and folder.is_dir():
            found.append((int(match[2]), int(match[1]), folder))
    return [folder for *_, folder in sorted(found, reverse=True)]


def is_complete(folder: Path) -> bool:
    """Return whether ColossalAI's folder was written to its end: converted ones hold nothing but `model/`."""
    return (folder / RUNNING_STATES_FILE).is_file() or [each.name for each in visible_files(folder)] == [MODEL_FOLDER]


def colossalai_parts(folder: Path) -> dict[Selection, Path]:
    """Return where which weights are in one of ColossalAI's folders; nothing if it is none.

    Raises:
        CheckpointError: it was not written to its end.
    """
    if not (folder / MODEL_FOLDER).is_dir() and not (folder / RUNNING_STATES_FILE).is_file():
        return {}
    if not is_complete(folder):
        raise unfinished_error(folder)
    parts = {}
    for selection, names in _PARTS.items():
        there = [folder / name for name in names if (folder / name).exists()]
        if there:
            parts[selection] = there[0]
    if not parts:
        raise CheckpointError(f"{folder} holds no weights")
    return parts


def read_running_document(folder: Path) -> dict[str, Any]:
    """Return the content of `running_states.json`; that of the reference and of earlier versions has no schema.

    Raises:
        CheckpointError: it is missing, broken, or of a version that is not known here.
    """
    path = folder / RUNNING_STATES_FILE
    document = read_json_object(path, problem=CheckpointError)
    if "schema" in document:
        require_schema(document, RUNNING_STATES_SCHEMA, path, problem=CheckpointError)
    return document


def unfinished_error(folder: Path) -> CheckpointError:
    """Return the error for a folder that was not written to its end."""
    return CheckpointError(
        f"{folder} was not written to its end: it lacks {RUNNING_STATES_FILE}",
        hint=f"choose an earlier one; or, if you know that they are whole, name {folder / MODEL_FOLDER} or a file",
    )
