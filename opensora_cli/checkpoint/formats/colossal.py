"""Layout of ColossalAI's checkpoint folders, which training writes too."""

import re
from pathlib import Path
from typing import Any

from opensora_cli.checkpoint.files import visible_files
from opensora_cli.core.choices import Selection
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.reading import read_json_object, require_schema

SETTINGS_FILE = "settings.json"
"""File with the settings of a run, in its folder."""

MODEL_FOLDER = "model"
EMA_FILE = "ema.safetensors"
MASTER_FILE = "master.safetensors"
OPTIMIZER_FOLDER = "optimizer"
RUNNING_STATES_FILE = "running_states.json"
"""Last file of a checkpoint: a folder with more than `model/` is incomplete without it."""
RUNNING_STATES_SCHEMA = "osora.running-states/2"

_PARTS = {
    Selection.MODEL: (MODEL_FOLDER,),
    Selection.EMA: (EMA_FILE, "ema.pt"),
    Selection.MASTER: (MASTER_FILE, "master.pt"),
}
_EPOCH_FOLDER = re.compile(r"epoch(\d+)-global_step(\d+)")


def checkpoint_folder_name(*, epoch: int, global_step: int) -> str:
    """Return the name of the checkpoint folder of an epoch, counted from 0, after `global_step` updates."""
    return f"epoch{epoch}-global_step{global_step}"


def epoch_folders(run: Path) -> list[Path]:
    """Return the complete checkpoints in the folder of a run, newest first."""
    return [folder for folder in all_epoch_folders(run) if is_complete(folder)]


def all_epoch_folders(run: Path) -> list[Path]:
    """Return the complete and incomplete checkpoints in the folder of a run, newest first."""
    found = []
    for folder in visible_files(run):
        match = _EPOCH_FOLDER.fullmatch(folder.name)
        if match and folder.is_dir():
            found.append((int(match[2]), int(match[1]), folder))
    return [folder for *_, folder in sorted(found, reverse=True)]


def is_complete(folder: Path) -> bool:
    """Return whether a folder is complete; converted ones hold `model/` alone."""
    return (folder / RUNNING_STATES_FILE).is_file() or [each.name for each in visible_files(folder)] == [MODEL_FOLDER]


def colossalai_parts(folder: Path) -> dict[Selection, Path]:
    """Return the path of each kind of weights in a folder; an empty dictionary for another kind of folder.

    Raises CheckpointError if the folder is incomplete.
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
    """Return the content of `running_states.json`, which has no schema in folders of the reference.

    Raises CheckpointError if it is missing, broken, or of another version.
    """
    path = folder / RUNNING_STATES_FILE
    document = read_json_object(path, problem=CheckpointError)
    if "schema" in document:
        require_schema(document, RUNNING_STATES_SCHEMA, path, problem=CheckpointError)
    return document


def unfinished_error(folder: Path) -> CheckpointError:
    """Return the error for an incomplete folder."""
    return CheckpointError(
        f"{folder} was not written to its end: it lacks {RUNNING_STATES_FILE}",
        hint=f"choose an earlier one; or, if you know that they are whole, name {folder / MODEL_FOLDER} or a file",
    )
