"""Opening a checkpoint of any format, detected from its files, and choosing one of the sets of weights in it.

The index of shards is the one of transformers: `weight_map`, tensor to file name, and `metadata`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from opensora_cli.checkpoint.files import reading, reading_file, refuse_outside, visible_files
from opensora_cli.checkpoint.formats.colossal import (
    SETTINGS_FILE,
    all_epoch_folders,
    colossalai_parts,
    epoch_folders,
    unfinished_error,
)
from opensora_cli.checkpoint.formats.dcp import DCP_METADATA, DCP_SUFFIX, open_dcp
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.formats.torch import mapped_tensor, read_object
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.core.choices import Format, Selection
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import first_few, plain, shown
from opensora_cli.core.reading import read_json_object, stays_inside

_START_BYTES = 512
_SHOWN_BYTES = 16
_TORCH_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80"
_INDEX, _SAFETENSORS_INDEX = ".index.json", ".safetensors.index.json"
_NO_WEIGHTS = (
    (rb"$", "is empty", "fetch it again"),
    (rb"GGUF", "is a GGUF file, which osora does not read", "get the safetensors file of this model"),
    (
        rb"version https://git-lfs.github.com/spec/",
        "is a pointer that Git LFS left in place of the file",
        "run git lfs pull, or fetch it with osora ckpt download",
    ),
    (
        rb"(?i)\s*(<!doctype|<html|<\?xml)",
        "is a web page that was saved in place of the file",
        "fetch the file itself, logged in where that is needed",
    ),
    (
        rb"(?s).{257}ustar",
        "is refused: it is a tar archive, of a torch so old that reading it could run any code",
        "load it in a sandbox, and save it again",
    ),
)
"""Pattern of the start, reason and hint of files without weights."""
_SHARD_NAME = re.compile(r"(.+)-(\d{5,9})-of-(\d{5,9})(\..+)", re.ASCII)
_KEYS = {
    Selection.MODEL: ("model", "state_dict", "module", "model_state_dict", "generator"),
    Selection.EMA: ("ema", "ema_state_dict", "model_ema", "generator_ema"),
    Selection.MASTER: ("master",),
}
"""Usual names of the weights in a dictionary that holds more than them."""
_MAX_DEPTH = 32
_MAX_TOTAL_NAME_LENGTH = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint; none of its tensors has been read."""

    format: Format
    path: Path
    """The opened file or folder."""
    selection: Selection | None = None
    """Selected set of weights; None if there is no choice."""
    selections: tuple[Selection, ...] = ()
    """Sets of weights to choose from; empty if there is no choice."""
    entries: Mapping[str, LazyTensor]
    """The tensors by name, in the file's order."""
    metadata: Mapping[str, str]
    """Text stored beside the tensors."""
    files: tuple[Path, ...]
    """Every file of `entries`, index files included."""


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
        return _open_dcp(path.parent, select) if path.name == DCP_METADATA else _open_file(path, select)


def _open_folder(folder: Path, select: Selection | None) -> Checkpoint:
    if (folder / DCP_METADATA).exists() or any(folder.glob(f"*{DCP_SUFFIX}")):
        return _open_dcp(folder, select)
    parts = colossalai_parts(folder)
    if parts:
        selection, selections = _choose(select, parts, path=folder)
        opened = _open_weights(refuse_outside(parts[selection or Selection.MODEL], folder))
        return replace(opened, format=Format.COLOSSALAI, path=folder, selection=selection, selections=selections)
    epochs = epoch_folders(folder)
    if len(epochs) > 1 and not (folder / SETTINGS_FILE).is_file():
        raise RequestError(f"{folder} holds {len(epochs)} checkpoints", hint=f"name one; the newest is {epochs[0]}")
    if epochs:
        return _open_folder(refuse_outside(epochs[0], folder), select)
    return _open_weights(folder, select)


def _open_weights(path: Path, select: Selection | None = None) -> Checkpoint:
    return replace(_open_file(_find_weights(path) if path.is_dir() else path, select), path=path)


def _open_dcp(folder: Path, select: Selection | None) -> Checkpoint:
    tree, files = open_dcp(folder)
    return _open_tree(tree, select, format=Format.DCP, path=folder, files=files)


def _open_file(path: Path, select: Selection | None = None, *, is_shard: bool = False) -> Checkpoint:
    kind = _sniff(path)
    if isinstance(kind, CheckpointError):
        raise kind
    if not is_shard and (shard := _shard_of(path)):
        raise CheckpointError(
            f"{path} is shard {int(shard[2])} of {int(shard[3])}, a part of a checkpoint",
            hint="name the index of the shards, or their folder",
        )
    if kind is Format.TORCH:
        return _open_tree(read_object(path), select, format=Format.TORCH, path=path, files=(path,))
    _choose(select, (), path=path)
    if kind is Format.SAFETENSORS:
        entries, metadata = open_safetensors(path)
        return Checkpoint(format=Format.SAFETENSORS, path=path, entries=entries, metadata=metadata, files=(path,))
    if is_shard:
        raise CheckpointError(f"{path} holds no weights: it is JSON")
    return _open_index(path)


def _sniff(path: Path) -> Format | CheckpointError:
    """Return the format of a file, for an index of shards `SAFETENSORS_SHARDS`, or the error if it has no weights."""
    start = read_start(path)
    # The length of a safetensors header has a zero in its last byte; no JSON has one.
    if start[7:9] == b"\0{":
        return Format.SAFETENSORS
    if start.startswith((_TORCH_MAGIC, _PICKLE_MAGIC)):
        return Format.TORCH
    if start.lstrip().startswith(b"{"):
        return Format.SAFETENSORS_SHARDS
    for pattern, reason, hint in _NO_WEIGHTS:
        if re.match(pattern, start):
            return CheckpointError(f"{path} {reason}", hint=hint)
    return CheckpointError(f"{path} holds no weights: it begins with {start[:_SHOWN_BYTES]!r}")


def read_start(path: Path) -> bytes:
    """Return the first bytes of a file."""
    with reading_file(path), path.open("rb") as file:
        return file.read(_START_BYTES)


def _open_index(path: Path) -> Checkpoint:
    """Open all shards of an index, which must lie in its folder and hold what it says."""
    document = read_json_object(refuse_outside(path, path.parent), problem=CheckpointError)
    weight_map, metadata = document.get("weight_map"), document.get("metadata", {})
    if (
        not isinstance(weight_map, dict)
        or not isinstance(metadata, dict)
        or not all(type(name) is str for name in weight_map.values())
    ):
        raise CheckpointError(f"{path} is no index of shards: it has no weight_map of tensor to file name")
    shards = {}
    for name in sorted(set(weight_map.values())):
        if not stays_inside(name):
            problem = f"{path} names a shard outside its folder: {shown(name)}"
            raise CheckpointError(problem, hint="don't trust its source")
        shards[name] = refuse_outside(path.parent / name, path.parent)
    try:
        missing = [name for name, shard in shards.items() if not shard.is_file()]
    except OSError as error:
        raise CheckpointError(f"{path} names a shard that cannot be read: {error.strerror or error}") from error
    if missing:
        problem = f"{path} names {len(shards)} shards, of which {len(missing)} are missing: {first_few(missing)}"
        raise CheckpointError(problem, hint="fetch them")
    entries: dict[str, LazyTensor] = {}
    described: dict[str, str] = {}
    format = Format.SAFETENSORS_SHARDS
    for name, shard in shards.items():
        opened = _open_file(shard, is_shard=True)
        listed = {key for key, holder in weight_map.items() if holder == name}
        if lacking := sorted(listed - opened.entries.keys()):
            raise CheckpointError(f"{shard} lacks tensors that {path.name} has in it: {first_few(lacking)}")
        if strange := sorted(opened.entries.keys() - listed):
            raise CheckpointError(f"{shard} has tensors that {path.name} has not in it: {first_few(strange)}")
        entries.update(opened.entries)
        described.update(opened.metadata)
        if opened.format is Format.TORCH:
            format = Format.TORCH
    return Checkpoint(
        format=format,
        path=path,
        entries=entries,
        metadata=described | {key: value for key, value in metadata.items() if isinstance(value, str)},
        files=(path, *shards.values()),
    )


def _find_weights(folder: Path) -> Path:
    """Return the index of the shards in a folder, or else the only file with weights. Safetensors go first.

    A link to a file elsewhere is not followed, not even to detect the format.
    """
    indexes = [path for path in visible_files(folder) if path.name.endswith(_INDEX)]
    if indexes:
        return _only([path for path in indexes if path.name.endswith(_SAFETENSORS_INDEX)] or indexes, folder)
    kinds = {path: _sniff(refuse_outside(path, folder)) for path in visible_files(folder) if path.is_file()}
    weights = [path for path, kind in kinds.items() if kind in (Format.SAFETENSORS, Format.TORCH)]
    chosen = [path for path in weights if kinds[path] is Format.SAFETENSORS] or weights
    if shard := next(filter(None, map(_shard_of, chosen)), None):
        raise CheckpointError(
            f"{folder} holds shards without their index: it lacks {plain(f'{shard[1]}{shard[4]}.index.json')}",
            hint="fetch what is missing; the index maps each tensor to its shard",
        )
    if chosen:
        return _only(chosen, folder)
    for path, kind in kinds.items():
        if isinstance(kind, CheckpointError) and kind.hint is not None and path.stat().st_size:
            raise kind
    if unfinished := all_epoch_folders(folder):
        raise unfinished_error(unfinished[0])
    there = f"only {first_few([path.name for path in kinds])}" if kinds else "no file"
    raise CheckpointError(
        f"{folder} holds no checkpoint: there is {there}", hint="name the file or folder with weights"
    )


def _only(paths: list[Path], folder: Path) -> Path:
    if len(paths) > 1:
        names = first_few([path.name for path in paths])
        raise RequestError(f"{folder} holds several checkpoints: {names}", hint="name one of them")
    return paths[0]


def _shard_of(path: Path) -> re.Match[str] | None:
    """Return the match of a name such as `model-00001-of-00004.safetensors`. A single shard is a whole checkpoint."""
    match = _SHARD_NAME.fullmatch(path.name)
    return match if match and int(match[3]) > 1 else None


def _choose(
    select: Selection | None, parts: Sequence[Selection] | Mapping[Selection, object], *, path: Path
) -> tuple[Selection | None, tuple[Selection, ...]]:
    """Return the selected weights, by default the first, and all sets; None and no sets if there is no choice."""
    selections = () if set(parts) <= {Selection.MODEL} else tuple(parts)
    if select is not None and select not in (selections or (Selection.MODEL,)):
        there = ", ".join(selections) or "only one set of weights"
        raise RequestError(f"{path} has no {select} weights: it has {there}", hint="choose with --select")
    return (select or selections[0]) if selections else None, selections


def _open_tree(
    tree: Any, select: Selection | None, *, format: Format, path: Path, files: tuple[Path, ...]
) -> Checkpoint:
    """Open a state dict, or a nested dictionary of several, of which the selected one; other values are dropped."""
    parts = _parts(tree)
    selection, selections = _choose(select, parts, path=path)
    chosen = parts[selection or Selection.MODEL] if parts else tree
    for _ in range(_MAX_DEPTH):
        chosen = _parts(chosen).get(Selection.MODEL, chosen)
    return Checkpoint(
        format=format,
        path=path,
        selection=selection,
        selections=selections,
        entries=_leaves(chosen, path),
        metadata={},
        files=files,
    )


def _parts(tree: Any) -> dict[Selection, dict[Any, Any]]:
    """Return the separate sets of weights in `tree`; an empty dictionary if `tree` is itself one set."""
    if not isinstance(tree, dict) or any(isinstance(value, Tensor | LazyTensor) for value in dict.values(tree)):
        return {}
    found = {
        selection: [tree[key] for key in keys if isinstance(dict.get(tree, key), dict)]
        for selection, keys in _KEYS.items()
    }
    return {selection: trees[0] for selection, trees in found.items() if trees}


def _leaves(tree: Any, path: Path) -> dict[str, LazyTensor]:
    """Return the tensors in nested dictionaries, lists and tuples, by names joined with dots."""
    leaves: dict[str, LazyTensor] = {}
    size = path.stat().st_size
    # The time is bounded even for cycles and shared references.
    left = _MAX_TOTAL_NAME_LENGTH

    def add(name: str, node: Any, depth: int) -> None:
        nonlocal left
        left -= len(name) + 1
        if left < 0 or depth >= _MAX_DEPTH:
            raise CheckpointError(f"{path} nests its tensors too deep, or has too many")
        if isinstance(node, Tensor | LazyTensor):
            if not name:
                raise CheckpointError(f"{path} holds a tensor without a name, not a state dict")
            if name in leaves:
                raise CheckpointError(f"{path} has two tensors called {shown(name)}")
            leaves[name] = node if isinstance(node, LazyTensor) else mapped_tensor(path, name, node, most=size)
        elif isinstance(node, dict | list | tuple):
            for key, value in dict.items(node) if isinstance(node, dict) else enumerate(node):
                add(f"{name}.{key}" if name else str(key), value, depth + 1)

    add("", tree, 0)
    if not leaves and tree != {}:
        raise CheckpointError(f"{path} holds no tensors")
    return leaves
