"""Writing a checkpoint in any of the formats, whole or absent.

A file or a folder is written under a temporary name beside its own, flushed and renamed. The last file of a folder is
the one that makes it a checkpoint for readers: the index of shards, or `.metadata` of torch.distributed.checkpoint.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from opensora_cli.checkpoint.formats.colossal import MODEL_FOLDER
from opensora_cli.checkpoint.formats.dcp import write_dcp
from opensora_cli.checkpoint.formats.safetensors import write_safetensors
from opensora_cli.checkpoint.formats.torch import write_torch
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.transforms import cast
from opensora_cli.core.choices import Format
from opensora_cli.core.files import atomic_folder, atomic_path, write_json_atomic
from opensora_cli.core.formatting import as_unicode
from opensora_cli.core.limits import freed_at_once

SHARD_BYTES = 4096 * 2**20
"""Default size of shards, also in ColossalAI."""

INDEX_FILE = "model.safetensors.index.json"
"""Index of safetensors shards."""


def write_checkpoint(
    entries: Mapping[str, LazyTensor],
    path: Path,
    *,
    format: Format,
    shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str] = MappingProxyType({}),
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[Path, ...]:
    """Write tensors as a checkpoint, reading them one by one, and return the files that were written.

    The caller has called `check_target`.

    Args:
        entries: the tensors.
        path: the file, or the folder of files.
        format: the format.
        shard_bytes: largest size of a shard, unless a single tensor is larger.
        metadata: stored beside the tensors in safetensors files and indexes; other formats have no room for it.
        overwrite: replace an existing file. A folder is never replaced, unless it is empty.
        advance: called with the bytes of tensors written by each step.

    Raises:
        RequestError: the format does not support the name or dtype of a tensor.
        CheckpointError: a tensor cannot be read.
        OutputError: `path` exists already, or cannot be written. The partial output is removed.
    """
    if not format.is_folder:
        with freed_at_once(), atomic_path(path, replace=overwrite) as temporary:
            if format is Format.TORCH:
                write_torch(temporary, entries, advance=advance)
            else:
                write_safetensors(temporary, entries, metadata=metadata, advance=advance)
        return (path,)
    with freed_at_once(), atomic_folder(path, replace=False) as temporary:
        if format is Format.DCP:
            write_dcp(temporary, entries, advance=advance)
        else:
            folder = temporary / MODEL_FOLDER if format is Format.COLOSSALAI else temporary
            folder.mkdir(exist_ok=True)
            shards = plan_shards(entries, shard_bytes)
            for name, shard in shards.items():
                write_safetensors(folder / name, shard, metadata=metadata, advance=advance)
            write_json_atomic(folder / INDEX_FILE, make_index(shards, metadata=metadata))
        written = [file.relative_to(temporary) for file in sorted(temporary.rglob("*")) if file.is_file()]
    return tuple(path / name for name in written)


def plan_shards(entries: Mapping[str, LazyTensor], shard_bytes: int = SHARD_BYTES) -> dict[str, dict[str, LazyTensor]]:
    """Distribute tensors over shards, in their order, and return these by the names of their files.

    There is at least one shard, and no shard is larger than `shard_bytes` unless a single tensor is.
    """
    shards: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, entry in entries.items():
        if shards[-1] and size + entry.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += entry.nbytes
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def make_index(shards: Mapping[str, Mapping[str, LazyTensor]], *, metadata: Mapping[str, str]) -> dict[str, object]:
    """Return the index: the shard of each tensor, and the metadata."""
    kept: dict[str, object] = {as_unicode(key): as_unicode(text) for key, text in metadata.items()}
    kept["total_size"] = sum(entry.nbytes for shard in shards.values() for entry in shard.values())
    return {"metadata": kept, "weight_map": {key: name for name, shard in shards.items() for key in shard}}


def write_weights(
    path: Path,
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a safetensors file piece by piece, rounded to `dtype` unless it is None, whole or not at all.

    Raises CheckpointError if a weight is too large for `dtype`, and OutputError if the file cannot be written.
    """
    entries = {name: LazyTensor.of(weight) for name, weight in weights.items()}
    with atomic_path(path) as temporary:
        write_safetensors(temporary, entries if dtype is None else cast(entries, dtype), metadata=metadata)
