"""Opening a checkpoint of any format, detected from its files."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from opensora_cli.checkpoint.contents import (
    DCP_METADATA,
    DCP_SUFFIX,
    PICKLE_MAGIC,
    TORCH_MAGIC,
    Checkpoint,
    choose,
    shard_of,
)
from opensora_cli.checkpoint.formats.colossal import (
    SETTINGS_FILE,
    all_epoch_folders,
    colossalai_parts,
    epoch_folders,
    unfinished_error,
)
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.readable import reading, reading_file, refuse_outside, visible_files
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import plain
from opensora_cli.core.weight_choices import Format, Selection

_LISTED = 10
_START_BYTES = 512
_SHOWN_BYTES = 16
_TAR_MAGIC, _TAR_OFFSET = b"ustar", 257
_GGUF_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_WEB_PAGES = (b"<!doctype", b"<html", b"<?xml")

_INDEXES = "*.index.json"
_SAFETENSORS_INDEX = ".safetensors.index.json"


def _sniff(path: Path) -> Format | CheckpointError:
    """Return the format of a file, for an index of shards `SAFETENSORS_SHARDS`, or the error if it has no weights.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
    """
    start = read_start(path)
    text = start.lstrip().lower()
    # The length of a safetensors header has a zero in its last byte; no JSON has one.
    if start[7:9] == b"\0{":
        return Format.SAFETENSORS
    if start.startswith((TORCH_MAGIC, PICKLE_MAGIC)):
        return Format.TORCH
    if text.startswith(b"{"):
        return Format.SAFETENSORS_SHARDS
    if not start:
        return CheckpointError(f"{path} is empty", hint="fetch it again")
    if start.startswith(_GGUF_MAGIC):
        return CheckpointError(
            f"{path} is a GGUF file, which osora does not read", hint="get the safetensors file of this model"
        )
    if start.startswith(_LFS_POINTER):
        return CheckpointError(
            f"{path} is a pointer that Git LFS left in place of the file",
            hint="run git lfs pull, or fetch it with osora ckpt download",
        )
    if text.startswith(_WEB_PAGES):
        return CheckpointError(
            f"{path} is a web page that was saved in place of the file",
            hint="fetch the file itself, logged in where that is needed",
        )
    if start[_TAR_OFFSET:].startswith(_TAR_MAGIC):
        return CheckpointError(
            f"{path} is refused: it is a tar archive, of a torch so old that reading it could run any code",
            hint="load it in a sandbox, and save it again",
        )
    return CheckpointError(f"{path} holds no weights: it begins with {start[:_SHOWN_BYTES]!r}")


def read_start(path: Path) -> bytes:
    """Read the first bytes of a file.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
    """
    with reading_file(path), path.open("rb") as file:
        return file.read(_START_BYTES)


def open_checkpoint(path: Path, *, select: Selection | None = None) -> Checkpoint:
    """Open a checkpoint, without reading a tensor.

    `path` is a file, the index of shards, or a folder: of shards, of `torch.distributed.checkpoint`, of ColossalAI, of
    this project's training, or with a single file of weights. If there are several sets of weights, the default
    selection is the model's.

    Raises:
        CheckpointError: the path is missing, broken or incomplete, or cannot be read without trusting it.
        RequestError: the path holds several checkpoints, or lacks the selected weights.
    """
    with reading(path):
        if path.is_dir():
            return _open_folder(path, select)
        if path.name == DCP_METADATA:
            return _open_dcp(path.parent, select)
        return _open_file(path, select)


def _open_file(path: Path, select: Selection | None) -> Checkpoint:
    kind = _sniff(path)
    if kind is Format.TORCH:
        from opensora_cli.checkpoint.formats.torch import open_torch

        return open_torch(path, select=select)
    choose(select, (), path=path)
    if kind is not Format.SAFETENSORS_SHARDS:
        entries, metadata = _open_shard(path)
        return Checkpoint(format=Format.SAFETENSORS, path=path, entries=entries, metadata=metadata, files=(path,))
    from opensora_cli.checkpoint.shards import open_shards, read_index

    index = read_index(path)
    entries, metadata, files = open_shards(index, open_shard=_open_shard)
    is_torch = any(_sniff(shard) is Format.TORCH for shard in files[1:])
    return Checkpoint(
        format=Format.TORCH_SHARDS if is_torch else Format.SAFETENSORS_SHARDS,
        path=path,
        entries=entries,
        metadata=metadata,
        files=files,
        index=index,
    )


def _open_shard(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    kind = _sniff(path)
    if kind is Format.SAFETENSORS:
        return open_safetensors(path)
    if kind is Format.TORCH:
        from opensora_cli.checkpoint.formats.torch import open_torch

        opened = open_torch(path)
        return dict(opened.entries), dict(opened.metadata)
    raise kind if isinstance(kind, CheckpointError) else CheckpointError(f"{path} holds no weights: it is JSON")


def _open_dcp(folder: Path, select: Selection | None) -> Checkpoint:
    # Readers of pickles are imported for these formats alone: most weights are safetensors.
    from opensora_cli.checkpoint.formats.dcp import open_dcp

    return open_dcp(folder, select=select)


def _open_folder(folder: Path, select: Selection | None) -> Checkpoint:
    if (folder / DCP_METADATA).exists() or any(folder.glob(f"*{DCP_SUFFIX}")):
        return _open_dcp(folder, select)
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
    return _open_weights(folder, select)


def _open_weights(path: Path, select: Selection | None = None) -> Checkpoint:
    if not path.is_dir():
        return _open_file(path, select)
    return replace(_open_file(find_index(path) or find_file(path), select), path=path)


def find_index(folder: Path) -> Path | None:
    """Return the index of the shards in a folder, if there is one. An index of safetensors goes first.

    Raises:
        RequestError: it has several.
    """
    indexes = sorted(path for path in visible_files(folder) if path.match(_INDEXES))
    chosen = [path for path in indexes if path.name.endswith(_SAFETENSORS_INDEX)] or indexes
    if len(chosen) > 1:
        raise RequestError(f"{folder} holds several checkpoints: {_names(chosen)}", hint="name one of them")
    return chosen[0] if chosen else None


def find_file(folder: Path) -> Path:
    """Return the only file with weights in a folder without an index. A safetensors file goes first.

    Raises:
        RequestError: the folder has several.
        CheckpointError: the folder has none, or shards, or only an unfinished training checkpoint, or a link to a file
            elsewhere. Such a link is not followed, not even to detect the format.
    """
    kinds = {path: _sniff(refuse_outside(path, folder)) for path in visible_files(folder) if path.is_file()}
    weights = [path for path, kind in kinds.items() if kind in (Format.SAFETENSORS, Format.TORCH)]
    chosen = [path for path in weights if kinds[path] is Format.SAFETENSORS] or weights
    if index := next((shard[0] for path in chosen if (shard := shard_of(path.name))), None):
        raise CheckpointError(
            f"{folder} holds shards without their index: it lacks {plain(index)}",
            hint="fetch what is missing; the index maps each tensor to its shard",
        )
    if len(chosen) > 1:
        raise RequestError(f"{folder} holds several checkpoints: {_names(chosen)}", hint="name one of them")
    if chosen:
        return chosen[0]
    for path, kind in kinds.items():
        if isinstance(kind, CheckpointError) and kind.hint is not None and path.stat().st_size:
            raise kind
    if unfinished := all_epoch_folders(folder):
        raise unfinished_error(unfinished[0])
    there = f"only {_names(kinds)}" if kinds else "no file"
    raise CheckpointError(
        f"{folder} holds no checkpoint: there is {there}", hint="name the file or folder with weights"
    )


def _names(paths: Iterable[Path]) -> str:
    names = [path.name if path.name.isprintable() else ascii(path.name) for path in paths]
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
