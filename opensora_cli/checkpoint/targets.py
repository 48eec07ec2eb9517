"""Checks of the path to which a checkpoint is written. Needs no torch."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from opensora_cli.checkpoint.formats.colossal import MODEL_FOLDER
from opensora_cli.core.choices import Format
from opensora_cli.core.exceptions import OutputError, RequestError
from opensora_cli.core.files import nearest_existing, refuse_special, require_space, writing
from opensora_cli.core.formatting import first_few

_OWN_NAMES = {
    Format.SAFETENSORS_SHARDS: re.compile(r"model(-\d{5,}-of-\d{5,}\.safetensors|\.safetensors\.index\.json)"),
    Format.TORCH_SHARDS: re.compile(r"pytorch_model(-\d{5,}-of-\d{5,}\.bin|\.bin\.index\.json)"),
    Format.DCP: re.compile(r"__\d+_\d+\.distcp|\.metadata"),
}
"""Files in a folder of each format; ColossalAI's holds another folder."""


def check_target(path: Path, *, format: Format, overwrite: bool, sources: Iterable[Path] = (), needed: int = 0) -> None:
    """Check, before hours of work, that `write_checkpoint` can write tensors of `needed` bytes.

    Raises:
        RequestError: `path` is one of the `sources`, inside of one, or around one.
        OutputError: `path` exists already, holds more than a checkpoint, or lies in a folder without write permission,
            or its disk is too small.
    """
    with writing(path):
        here = Path(os.path.realpath(path))
        for source in sources:
            there = Path(os.path.realpath(source))
            if here == there or (path.exists() and path.samefile(source)):
                raise RequestError(f"{path} is also the source", hint="write to another name")
            if there in here.parents or here in there.parents:
                raise RequestError(f"{path} and the source {source} overlap", hint="write to another folder")
        refuse_to_replace(path, format=format, overwrite=overwrite)
        place = nearest_existing(path.absolute().parent)
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            problem = f"nothing may be written to {place}" if place.is_dir() else f"{place} is not a folder"
            raise OutputError(f"cannot write {path}: {problem}", hint="choose another folder")
        require_space(path, needed)


def refuse_to_replace(path: Path, *, format: Format, overwrite: bool) -> None:
    """Raise OutputError if a checkpoint of this format must not replace the file or folder at `path`."""
    is_empty = format.is_folder and path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if not os.path.lexists(path) or is_empty:
        return
    refuse_special(path)
    if path.is_dir() and not format.is_folder:
        raise OutputError(f"{path} is a folder", hint="give the name of a file, or a format of several files")
    if format.is_folder and not path.is_dir():
        raise OutputError(f"{path} is a file", hint="give the name of a folder, or a format of one file")
    if not overwrite:
        raise OutputError(f"{path} exists already", hint="use --overwrite, or write to another name")
    if format.is_folder and (foreign := _foreign(path, format)):
        names = first_few([str(file.relative_to(path)) for file in foreign])
        raise OutputError(
            f"{path} holds more than a checkpoint of {format}, which would be lost: {names}",
            hint="write to another folder",
        )


def _foreign(folder: Path, format: Format) -> list[Path]:
    """Return the paths in a folder that do not belong to a checkpoint of this format."""
    there = sorted(folder.iterdir())
    if format is Format.COLOSSALAI:
        inner = folder / MODEL_FOLDER
        return [path for path in there if path != inner] or _foreign(inner, Format.SAFETENSORS_SHARDS)
    return [path for path in there if not _OWN_NAMES[format].fullmatch(path.name) or path.is_dir()]
