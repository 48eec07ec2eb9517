"""Opening a checkpoint of any format, which is found out from what is there."""

from dataclasses import replace
from pathlib import Path

from opensora_cli.checkpoint.dcp import DATA_SUFFIX, METADATA_FILE, open_dcp
from opensora_cli.checkpoint.entries import Entry
from opensora_cli.checkpoint.folders import (
    SETTINGS_FILE,
    TRAINING_FILE,
    colossalai_parts,
    epoch_folders,
    find_file,
    find_index,
)
from opensora_cli.checkpoint.formats import Checkpoint, Format, Selection
from opensora_cli.checkpoint.pickles import open_torch
from opensora_cli.checkpoint.recognition import Kind, recognise, refusal
from opensora_cli.checkpoint.safetensors_file import open_safetensors
from opensora_cli.checkpoint.shards import open_shards, refuse_outside
from opensora_cli.checkpoint.state_dicts import choose
from opensora_cli.core.exceptions import CheckpointError, RequestError


def open_checkpoint(path: Path, *, select: Selection | None = None) -> Checkpoint:
    """Open a checkpoint, without reading a tensor.

    Args:
        path: a file, the index of shards, or a folder: of shards, of `torch.distributed.checkpoint`, of ColossalAI, of
            this project's trainings, or with a single file of weights.
        select: which weights, where there are several; None: those of the model.

    Raises:
        CheckpointError: there is nothing, or it is broken, incomplete, or cannot be read without trusting it.
        RequestError: it holds several checkpoints, or not the weights that were asked for.
    """
    try:
        if path.is_dir():
            return _open_folder(path, select)
        if path.name == METADATA_FILE:
            return open_dcp(path.parent, select=select)
        return _open_file(path, select)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _open_file(path: Path, select: Selection | None) -> Checkpoint:
    kind = recognise(path)
    if kind is Kind.TORCH:
        return open_torch(path, select=select)
    choose(select, (), path=path)
    if kind is Kind.JSON:
        return _open_index(path)
    entries, metadata = _open_shard(path)
    return Checkpoint(format=Format.SAFETENSORS, path=path, entries=entries, metadata=metadata, files=(path,))


def _open_index(path: Path) -> Checkpoint:
    entries, metadata, files = open_shards(path, open_shard=_open_shard)
    is_torch = any(recognise(shard) is Kind.TORCH for shard in files[1:])
    return Checkpoint(
        format=Format.TORCH_SHARDS if is_torch else Format.SAFETENSORS_SHARDS,
        path=path,
        entries=entries,
        metadata=metadata,
        files=files,
    )


def _open_shard(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    kind = recognise(path)
    if kind is Kind.SAFETENSORS:
        return open_safetensors(path)
    if kind is Kind.TORCH:
        opened = open_torch(path)
        return dict(opened.entries), dict(opened.metadata)
    raise refusal(path, kind)


def _open_folder(folder: Path, select: Selection | None) -> Checkpoint:
    if (folder / METADATA_FILE).exists() or any(folder.glob(f"*{DATA_SUFFIX}")):
        return open_dcp(folder, select=select)
    parts = colossalai_parts(folder)
    if parts:
        selections = () if parts.keys() == {Selection.MODEL} else tuple(parts)
        selection = choose(select, selections, path=folder)
        opened = _open_weights(refuse_outside(parts[selection or Selection.MODEL], folder))
        return replace(opened, format=Format.COLOSSALAI, path=folder, selection=selection, selections=selections)
    epochs = epoch_folders(folder)
    if len(epochs) > 1 and not (folder / SETTINGS_FILE).is_file():
        raise RequestError(f"{folder} holds {len(epochs)} checkpoints", hint=f"name one; the newest is {epochs[0]}")
    if epochs:
        return _open_folder(refuse_outside(epochs[0], folder), select)
    if (folder / TRAINING_FILE).exists():
        opened = open_torch(refuse_outside(folder / TRAINING_FILE, folder), select=select)
        return replace(opened, path=folder)
    return _open_weights(folder, select)


def _open_weights(path: Path, select: Selection | None = None) -> Checkpoint:
    if not path.is_dir():
        return _open_file(path, select)
    return replace(_open_file(find_index(path) or find_file(path), select), path=path)
