"""Writing a checkpoint in any of the formats, whole or absent.

A file is written under a temporary name beside its own, flushed and renamed. A folder is handled in the same way, with
all its content. Its last file is the one that makes it a checkpoint for readers: the index of shards, or `.metadata`
of torch.distributed.checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.checkpoint.contents import Format
from opensora_cli.checkpoint.formats.colossal import MODEL_FOLDER
from opensora_cli.checkpoint.formats.dcp import write_dcp
from opensora_cli.checkpoint.formats.safetensors import write_safetensors
from opensora_cli.checkpoint.formats.torch import write_torch
from opensora_cli.checkpoint.lazy import LazyTensor, cast
from opensora_cli.checkpoint.shards import SAFETENSORS_FORM, SHARD_BYTES, ShardForm, write_shards
from opensora_cli.checkpoint.targets import FILE_FORMATS, check_target, refuse_to_replace
from opensora_cli.core.files import atomic_folder, atomic_path
from opensora_cli.core.private_memory import freed_at_once

_TORCH_FORM = ShardForm(stem="pytorch_model", suffix=".bin", write=write_torch)


def write_checkpoint(
    entries: Mapping[str, LazyTensor],
    path: Path,
    *,
    format: Format,
    shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    hash_each: Callable[[Sequence[Path]], Sequence[str]] | None = None,
    advance: Callable[[int], None] | None = None,
) -> tuple[Path, ...]:
    """Write tensors as a checkpoint, reading them piece by piece, and return the files that were written.

    Args:
        entries: the tensors.
        path: the file, or the folder that the shards go to.
        format: any format except the one of training checkpoints.
        shard_bytes: largest size of a shard, unless a single tensor is larger.
        metadata: stored beside the tensors; torch.distributed.checkpoint has no room for it.
        overwrite: replace an existing file or folder. A folder is replaced only if it holds a checkpoint of the same
            format and nothing else.
        hash_each: returns the SHA-256 of each given file; the index stores the hashes of the shards.
        advance: called with the bytes of tensors written by each step.

    Raises:
        RequestError: the format is not written here, or does not support the name or dtype of a tensor.
        CheckpointError: a tensor cannot be read.
        OutputError: `path` exists already, at the start or at the end, or cannot be written. The partial output is
            removed.
    """
    check_target(path, format=format, needed=sum(entry.nbytes for entry in entries.values()), overwrite=overwrite)
    if format in FILE_FORMATS:
        write = write_safetensors if format is Format.SAFETENSORS else write_torch
        with freed_at_once(), atomic_path(path, replace=overwrite) as temporary:
            write(temporary, entries, metadata=metadata or {}, advance=advance)
        return (path,)
    with freed_at_once(), atomic_folder(path, replace=overwrite) as temporary:
        if format is Format.DCP:
            write_dcp(temporary, entries, advance=advance)
        else:
            folder = temporary / MODEL_FOLDER if format is Format.COLOSSALAI else temporary
            folder.mkdir(exist_ok=True)
            write_shards(
                folder,
                entries,
                shard_bytes=shard_bytes,
                metadata=metadata or {},
                form=_TORCH_FORM if format is Format.TORCH_SHARDS else SAFETENSORS_FORM,
                hash_each=hash_each,
                advance=advance,
            )
        # Checked again: hours may have passed since the first check.
        refuse_to_replace(path, format=format, overwrite=overwrite)
        written = [file.relative_to(temporary) for file in sorted(temporary.rglob("*")) if file.is_file()]
    return tuple(path / name for name in written)


def write_weights(
    path: Path, weights: Mapping[str, Tensor], *, dtype: torch.dtype, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file piece by piece, rounded to `dtype`, whole or not at all.
    Raises CheckpointError if a weight is too large for `dtype`, and OutputError if the file cannot be written.
    """
    entries = {name: cast(LazyTensor.of(weight), dtype, name=name) for name, weight in weights.items()}
    with atomic_path(path) as temporary:
        write_safetensors(temporary, entries, metadata=metadata or {})
