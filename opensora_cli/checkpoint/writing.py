"""Writing a checkpoint in any of the formats: whole or absent.

A file is written under a temporary name beside its own, flushed and renamed. So is a folder, with all that is in it;
and its last file is the one without which no reader takes it for a checkpoint: the index of shards, `.metadata` of
torch.distributed.checkpoint.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from opensora_cli.checkpoint.contents import Format
from opensora_cli.checkpoint.formats.colossal import MODEL_FOLDER
from opensora_cli.checkpoint.formats.dcp import write_dcp
from opensora_cli.checkpoint.formats.safetensors import write_safetensors
from opensora_cli.checkpoint.formats.torch import write_torch
from opensora_cli.checkpoint.shards import SAFETENSORS_FORM, SHARD_BYTES, ShardForm, write_shards
from opensora_cli.checkpoint.stream import Entry
from opensora_cli.core.exceptions import OutputError, RequestError
from opensora_cli.core.files import atomic_folder, atomic_path, refuse_special, require_space
from opensora_cli.core.formatting import first_few

_FILES = (Format.SAFETENSORS, Format.TORCH)

_FOLDERS = (Format.SAFETENSORS_SHARDS, Format.TORCH_SHARDS, Format.COLOSSALAI, Format.DCP)

_OWN_NAMES = {
    Format.SAFETENSORS_SHARDS: re.compile(r"model(-\d{5,}-of-\d{5,}\.safetensors|\.safetensors\.index\.json)"),
    Format.TORCH_SHARDS: re.compile(r"pytorch_model(-\d{5,}-of-\d{5,}\.bin|\.bin\.index\.json)"),
    Format.DCP: re.compile(r"__\d+_\d+\.distcp|\.metadata"),
}
"""The files that a folder of each format holds; ColossalAI's holds another folder."""


_TORCH_FORM = ShardForm(stem="pytorch_model", suffix=".bin", write=write_torch)


def write_checkpoint(
    entries: Mapping[str, Entry],
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
        format: any but a training's.
        shard_bytes: what no shard is larger than, unless a single tensor is.
        metadata: kept beside the tensors; torch.distributed.checkpoint has no room for it.
        overwrite: replace what is there. A folder is replaced only if it holds a checkpoint of the same format and
            nothing else.
        hash_each: gives the SHA-256 of each of some files, to put those of the shards into the index.
        advance: called with the bytes of tensors written by each step.

    Raises:
        RequestError: the format is not written here, or lacks the name or dtype of a tensor.
        CheckpointError: a tensor cannot be read.
        OutputError: `path` exists already (or does so at the end), or cannot be written; nothing is left of the
            attempt.
    """
    check_target(path, format=format, needed=sum(entry.nbytes for entry in entries.values()), overwrite=overwrite)
    if format in _FILES:
        write = write_safetensors if format is Format.SAFETENSORS else write_torch
        with atomic_path(path, replace=overwrite) as temporary:
            write(temporary, entries, metadata=metadata or {}, advance=advance)
        return (path,)
    with atomic_folder(path, replace=overwrite) as temporary:
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
        _refuse_to_replace(path, format=format, overwrite=overwrite)
        written = [file.relative_to(temporary) for file in sorted(temporary.rglob("*")) if file.is_file()]
    return tuple(path / name for name in written)


def check_target(path: Path, *, format: Format, needed: int, overwrite: bool) -> None:
    """Check before hours of work whether `write_checkpoint` could write tensors of `needed` bytes.

    Raises:
        RequestError: the format is not written here.
        OutputError: `path` exists already, holds more than a checkpoint, or lies where nothing may be written, or its
            disk is too small.
    """
    if format not in (*_FILES, *_FOLDERS):
        raise RequestError(f"the format {format} is written by trainings alone", hint="write safetensors")
    try:
        _refuse_to_replace(path, format=format, overwrite=overwrite)
        _refuse_unwritable(path)
        require_space(path, needed)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def _refuse_to_replace(path: Path, *, format: Format, overwrite: bool) -> None:
    is_folder = format in _FOLDERS
    is_empty = is_folder and path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if not os.path.lexists(path) or is_empty:
        return
    refuse_special(path)
    if path.is_dir() and not is_folder:
        raise OutputError(f"{path} is a folder", hint="give the name of a file, or a format of several files")
    if is_folder and not path.is_dir():
        raise OutputError(f"{path} is a file", hint="give the name of a folder, or a format of one file")
    if not overwrite:
        raise OutputError(f"{path} exists already", hint="use --overwrite, or write to another name")
    if is_folder and (foreign := _foreign(path, format)):
        names = first_few([str(file.relative_to(path)) for file in foreign])
        raise OutputError(
            f"{path} holds more than a checkpoint of {format}, which would be lost: {names}",
            hint="write to another folder",
        )


def _refuse_unwritable(path: Path) -> None:
    """Refuse a path whose folder cannot be made, or not be written to."""
    place = next((place for place in path.absolute().parents if os.path.lexists(place)), Path("/"))
    if not place.is_dir():
        raise OutputError(f"cannot write {path}: {place} is not a folder", hint="choose another name")
    if not os.access(place, os.W_OK | os.X_OK):
        raise OutputError(
            f"cannot write {path}: nothing may be written to {place}", hint="choose a folder that you may write to"
        )


def _foreign(folder: Path, format: Format) -> list[Path]:
    """Return what is in a folder, and would not be if it were nothing but a checkpoint of this format."""
    there = sorted(folder.iterdir())
    if format is Format.COLOSSALAI:
        inner = folder / MODEL_FOLDER
        others = [path for path in there if path != inner]
        return others or _foreign(inner, Format.SAFETENSORS_SHARDS)
    return [path for path in there if not _OWN_NAMES[format].fullmatch(path.name) or path.is_dir()]
