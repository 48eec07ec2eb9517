"""Opening a checkpoint of any format, detected from its files.

The index of shards is the one of transformers: `weight_map`, tensor to file name, and `metadata`.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from opensora_cli.checkpoint.contents import Checkpoint, choose, shard_of
from opensora_cli.checkpoint.formats.colossal import (
    SETTINGS_FILE,
    all_epoch_folders,
    colossalai_parts,
    epoch_folders,
    unfinished_error,
)
from opensora_cli.checkpoint.formats.dcp import DCP_METADATA, DCP_SUFFIX, open_dcp
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.formats.torch import open_torch
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.readable import is_sha256, reading, reading_file, refuse_outside, visible_files
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


def _sniff(path: Path) -> Format | CheckpointError:
    """Return the format of a file, for an index of shards `SAFETENSORS_SHARDS`, or the error if it has no weights.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
    """
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
            return open_dcp(path.parent, select=select)
        return _open_file(path, select)


def _open_file(path: Path, select: Selection | None = None, *, is_shard: bool = False) -> Checkpoint:
    kind = _sniff(path)
    if isinstance(kind, CheckpointError):
        raise kind
    if kind is Format.TORCH:
        return open_torch(path, select=select)
    choose(select, (), path=path)
    if kind is Format.SAFETENSORS:
        entries, metadata = open_safetensors(path)
        return Checkpoint(format=Format.SAFETENSORS, path=path, entries=entries, metadata=metadata, files=(path,))
    if is_shard:
        raise CheckpointError(f"{path} holds no weights: it is JSON")
    return _open_index(path)


def _open_index(path: Path) -> Checkpoint:
    """Open all shards of an index.

    Raises:
        CheckpointError: the file is no index; it names files that are missing or lie outside its folder, or hashes of
            other files; or it does not agree with the content of the shards.
    """
    document = read_json_object(refuse_outside(path, path.parent), problem=CheckpointError)
    weight_map, metadata = document.get("weight_map"), document.get("metadata", {})
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if (
        not isinstance(weight_map, dict)
        or not isinstance(metadata, dict)
        or not all(type(name) is str for name in names)
    ):
        raise CheckpointError(f"{path} is no index of shards: it has no weight_map of tensor to file name")
    shards = _find_shards(path, sorted(set(names)))
    sha256 = metadata.get("sha256", {})
    if not isinstance(sha256, dict) or (sha256 and sha256.keys() != shards.keys()):
        raise CheckpointError(f"{path} is broken: its sha256 is no mapping of each shard to its hash")
    if wrong := [name for name, digest in sha256.items() if not is_sha256(digest)]:
        raise CheckpointError(f"{path} is broken: it has no hash for {first_few(wrong)}, but other text")
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
            format = Format.TORCH_SHARDS
    return Checkpoint(
        format=format,
        path=path,
        entries=entries,
        metadata=described | {key: value for key, value in metadata.items() if isinstance(value, str)},
        files=(path, *shards.values()),
        sha256={shards[name]: digest for name, digest in sha256.items()},
    )


def _find_shards(index: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the paths of shards by name. Raises CheckpointError if some are missing or outside the folder."""
    folder = index.parent
    paths = {}
    for name in names:
        if not stays_inside(name):
            raise CheckpointError(
                f"{index} names a shard outside its folder: {shown(name)}", hint="don't trust its source"
            )
        paths[name] = refuse_outside(folder / name, folder)
    try:
        missing = [name for name, path in paths.items() if not path.is_file()]
    except OSError as error:
        raise CheckpointError(f"{index} names a shard that cannot be read: {error.strerror or error}") from error
    if missing:
        raise CheckpointError(
            f"{index} names {len(paths)} shards, of which {len(missing)} are missing: {first_few(missing)}",
            hint="fetch them",
        )
    return paths


def _open_folder(folder: Path, select: Selection | None) -> Checkpoint:
    if (folder / DCP_METADATA).exists() or any(folder.glob(f"*{DCP_SUFFIX}")):
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
    return _open_weights(folder, select)


def _open_weights(path: Path, select: Selection | None = None) -> Checkpoint:
    if not path.is_dir():
        return _open_file(path, select)
    return replace(_open_file(_find_weights(path), select), path=path)


def _find_weights(folder: Path) -> Path:
    """Return the index of the shards in a folder, or else the only file with weights. Safetensors go first.

    Raises:
        RequestError: the folder has several.
        CheckpointError: the folder has none, or shards, or only an unfinished training checkpoint, or a link to a file
            elsewhere. Such a link is not followed, not even to detect the format.
    """
    indexes = [path for path in visible_files(folder) if path.name.endswith(_INDEX)]
    if indexes:
        return _only([path for path in indexes if path.name.endswith(_SAFETENSORS_INDEX)] or indexes, folder)
    kinds = {path: _sniff(refuse_outside(path, folder)) for path in visible_files(folder) if path.is_file()}
    weights = [path for path, kind in kinds.items() if kind in (Format.SAFETENSORS, Format.TORCH)]
    chosen = [path for path in weights if kinds[path] is Format.SAFETENSORS] or weights
    if index := next((shard[0] for path in chosen if (shard := shard_of(path.name))), None):
        raise CheckpointError(
            f"{folder} holds shards without their index: it lacks {plain(index)}",
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
