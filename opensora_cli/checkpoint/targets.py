"""Checks of the path to which a checkpoint is written. Needs no torch."""

import os
import re
from pathlib import Path

from opensora_cli.checkpoint.contents import Format
from opensora_cli.checkpoint.formats.colossal import MODEL_FOLDER
from opensora_cli.core.exceptions import OutputError, RequestError
from opensora_cli.core.files import refuse_special, require_space
from opensora_cli.core.formatting import first_few

FILE_FORMATS = (Format.SAFETENSORS, Format.TORCH)

_FOLDERS = (Format.SAFETENSORS_SHARDS, Format.TORCH_SHARDS, Format.COLOSSALAI, Format.DCP)

_OWN_NAMES = {
    Format.SAFETENSORS_SHARDS: re.compile(r"model(-\d{5,}-of-\d{5,}\.safetensors|\.safetensors\.index\.json)"),
    Format.TORCH_SHARDS: re.compile(r"pytorch_model(-\d{5,}-of-\d{5,}\.bin|\.bin\.index\.json)"),
    Format.DCP: re.compile(r"__\d+_\d+\.distcp|\.metadata"),
}
"""The files in a folder of each format; ColossalAI's holds another folder."""


def check_target(path: Path, *, format: Format, needed: int, overwrite: bool) -> None:
    """Check, before hours of work, that `write_checkpoint` can write tensors of `needed` bytes.

    Raises:
        RequestError: the format is not written here.
        OutputError: `path` exists already, holds more than a checkpoint, or lies in a folder without write permission,
            or its disk is too small.
    """
    if format not in (*FILE_FORMATS, *_FOLDERS):
        raise RequestError(f"the format {format} is written by trainings alone", hint="write safetensors")
    try:
        refuse_to_replace(path, format=format, overwrite=overwrite)
        _refuse_unwritable(path)
        require_space(path, needed)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def refuse_to_replace(path: Path, *, format: Format, overwrite: bool) -> None:
    """Raise OutputError if a checkpoint of this format must not replace the file or folder at `path`."""
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
    """Refuse a path whose folder cannot be made or written to."""
    place = next((place for place in path.absolute().parents if os.path.lexists(place)), Path("/"))
    if not place.is_dir():
        raise OutputError(f"cannot write {path}: {place} is not a folder", hint="choose another name")
    if not os.access(place, os.W_OK | os.X_OK):
        raise OutputError(
            f"cannot write {path}: nothing may be written to {place}", hint="choose a folder that you may write to"
        )


def _foreign(folder: Path, format: Format) -> list[Path]:
    """Return the paths in a folder that do not belong to a checkpoint of this format."""
    there = sorted(folder.iterdir())
    if format is Format.COLOSSALAI:
        inner = folder / MODEL_FOLDER
        others = [path for path in there if path != inner]
        return others or _foreign(inner, Format.SAFETENSORS_SHARDS)
    return [path for path in there if not _OWN_NAMES[format].fullmatch(path.name) or path.is_dir()]
