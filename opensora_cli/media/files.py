"""Paths of pictures and videos, and checks that they can be read. It does not need torch."""

import os
from pathlib import Path

from opensora_cli.core.exceptions import MediaError
from opensora_cli.core.reading import reading, require_file


def media_path(path: str | os.PathLike[str], *, format: str, num_frames: int) -> Path:
    """Return the path of a result: `path`, or the folder of a PNG sequence."""
    target = Path(path)
    if format != "png" or num_frames == 1:
        return target
    return target.with_suffix("") if target.suffix.lower() == ".png" else target


def readable_file(path: str | os.PathLike[str]) -> Path:
    """Return `path`. Raises MediaError unless it is a readable file that is not empty."""
    hint = "osora reads files: download it first" if "://" in str(path) else None
    file = Path(path)
    require_file(path, problem=MediaError, hint=hint)
    with reading(path, problem=MediaError, hint=hint), file.open("rb") as stream:
        if not stream.read(1):
            raise MediaError(f"{file} is empty")
    return file
