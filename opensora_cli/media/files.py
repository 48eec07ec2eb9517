"""Where pictures and videos are, and whether they can be read. Needs no torch."""

import os
from pathlib import Path

from opensora_cli.core.exceptions import MediaError


def media_path(path: str | os.PathLike[str], *, format: str, num_frames: int) -> Path:
    """Return what `write_media` makes for these arguments: `path`, or the folder of a PNG sequence."""
    target = Path(path)
    if format != "png" or num_frames == 1:
        return target
    return target.with_suffix("") if target.suffix.lower() == ".png" else target


def readable_file(path: str | os.PathLike[str]) -> Path:
    """Return `path` if it is a file with something in it that may be read; else a MediaError."""
    file = Path(path)
    try:
        if file.is_dir():
            raise MediaError(f"{file} is a folder, not a picture or video")
        with file.open("rb") as stream:
            if not stream.read(1):
                raise MediaError(f"{file} is empty")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        cause = error.strerror if isinstance(error, OSError) and error.strerror else error
        address = "://" in str(path)
        raise MediaError(
            f"cannot read {path}: {cause}", hint="osora reads files: download it first" if address else None
        ) from error
    return file
