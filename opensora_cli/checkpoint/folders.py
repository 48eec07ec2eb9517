"""What is where in the folders that trainings and downloads leave."""

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from opensora_cli.checkpoint.formats import Selection
from opensora_cli.checkpoint.recognition import WEIGHTS, Kind, recognise, refusal
from opensora_cli.checkpoint.shards import ShardName, refuse_outside
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.listing import plain

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

_PARTS = {
    Selection.MODEL: (MODEL_FOLDER,),
    Selection.EMA: (EMA_FILE, "ema.pt"),
    Selection.MASTER: (MASTER_FILE, "master.pt"),
}
_INDEXES = "*.index.json"
_SAFETENSORS_INDEX = ".safetensors.index.json"
_EPOCH_FOLDER = re.compile(r"epoch(\d+)-global_step(\d+)")
_LISTED = 10


def checkpoint_folder_name(*, epoch: int, global_step: int) -> str:
    """Return what ColossalAI's folders are called: of an epoch, counted from 0, after so many updates."""
    return f"epoch{epoch}-global_step{global_step}"


def epoch_folders(run: Path) -> list[Path]:
    """Return the checkpoints in the folder of a run that were written to their end, newest first."""
    return [folder for folder in all_epoch_folders(run) if is_complete(folder)]


def all_epoch_folders(run: Path) -> list[Path]:
    """Return the folders with the names of checkpoints, newest first, whether they were written to their end or not."""
    found = []
    for folder in _listed(run):
        match = _EPOCH_FOLDER.fullmatch(folder.name)
        if match and folder.is_dir():
            found.append((int(match[2]), int(match[1]), folder))
    return [folder for *_, folder in sorted(found, reverse=True)]


def is_complete(folder: Path) -> bool:
    """Return whether ColossalAI's folder was written to its end: converted ones hold nothing but `model/`."""
    return (folder / RUNNING_STATES_FILE).is_file() or [each.name for each in _listed(folder)] == [MODEL_FOLDER]


def colossalai_parts(folder: Path) -> dict[Selection, Path]:
    """Return where which weights are in one of ColossalAI's folders; nothing if it is none.

    Raises:
        CheckpointError: it was not written to its end.
    """
    if not (folder / MODEL_FOLDER).is_dir() and not (folder / RUNNING_STATES_FILE).is_file():
        return {}
    if not is_complete(folder):
        raise _unfinished(folder)
    parts = {}
    for selection, names in _PARTS.items():
        there = [folder / name for name in names if (folder / name).exists()]
        if there:
            parts[selection] = there[0]
    if not parts:
        raise CheckpointError(f"{folder} holds no weights")
    return parts


def find_index(folder: Path) -> Path | None:
    """Return the index of the shards in a folder, if it has one; that of safetensors rather than another.

    Raises:
        RequestError: it has several.
    """
    indexes = sorted(path for path in _listed(folder) if path.match(_INDEXES))
    chosen = [path for path in indexes if path.name.endswith(_SAFETENSORS_INDEX)] or indexes
    if len(chosen) > 1:
        raise RequestError(f"{folder} holds several checkpoints: {_names(chosen)}", hint="name one of them")
    return chosen[0] if chosen else None


def find_file(folder: Path) -> Path:
    """Return the one file with weights in a folder without an index; a safetensors file rather than others.

    Raises:
        RequestError: it has several.
        CheckpointError: it has none, or shards, or nothing but an unfinished checkpoint of a training, or a link to a
            file elsewhere, which is not read even to see what it is.
    """
    kinds = {path: recognise(refuse_outside(path, folder)) for path in _listed(folder) if path.is_file()}
    weights = [path for path, kind in kinds.items() if kind in WEIGHTS]
    chosen = [path for path in weights if kinds[path] is Kind.SAFETENSORS] or weights
    if shards := [name for path in chosen if (name := ShardName.of(path.name))]:
        raise _without_index(folder, shards)
    if len(chosen) > 1:
        raise RequestError(f"{folder} holds several checkpoints: {_names(chosen)}", hint="name one of them")
    if chosen:
        return chosen[0]
    for path, kind in kinds.items():
        if kind in (Kind.LFS_POINTER, Kind.WEB_PAGE):
            raise refusal(path, kind)
    if unfinished := all_epoch_folders(folder):
        raise _unfinished(unfinished[0])
    there = f"only {_names(kinds)}" if kinds else "no file"
    raise CheckpointError(
        f"{folder} holds no checkpoint: there is {there}", hint="name the file or folder with weights"
    )


def _unfinished(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} was not written to its end: it lacks {RUNNING_STATES_FILE}",
        hint=f"choose an earlier one; or, if you know that they are whole, name {folder / MODEL_FOLDER} or a file",
    )


def _without_index(folder: Path, shards: Sequence[ShardName]) -> CheckpointError:
    """Say what a folder of shards lacks; where they are of several checkpoints, what those of the first one lack."""
    first = shards[0]
    there = {shard.number for shard in shards if (shard.index_name, shard.count) == (first.index_name, first.count)}
    # Whatever a name says: no list is made of a million numbers.
    missing = list(islice((str(each) for each in range(1, first.count + 1) if each not in there), _LISTED + 1))
    numbers = ", ".join(missing[:_LISTED]) + (", ..." if len(missing) > _LISTED else "")
    others = f" and, of shards 1 to {first.count}: {numbers}" if missing else ""
    return CheckpointError(
        f"{folder} holds shards without their index: it lacks {plain(first.index_name)}{others}",
        hint="fetch what is missing; the index says which tensor is in which shard",
    )


def _listed(folder: Path) -> list[Path]:
    """Return what is in a folder, but for hidden files: those that are being written are hidden."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error


def _names(paths: Iterable[Path]) -> str:
    names = [path.name if path.name.isprintable() else ascii(path.name) for path in paths]
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
