"""Pictures and videos without torch: whether they can be read, and the tags that `write_media` wrote to them."""

import json
import os
import struct
from pathlib import Path

from opensora_cli.core.exceptions import FileProblem, MediaError
from opensora_cli.core.formatting import shown_path
from opensora_cli.core.reading import reading, require_file

_MUXER_KEYS = {"major_brand", "minor_version", "compatible_brands", "encoder"}


def readable_file(path: str | os.PathLike[str]) -> Path:
    """Return `path`. Raises MediaError unless it is a readable file that is not empty."""
    hint = "osora reads files: download it first" if "://" in str(path) else None
    file = Path(path)
    require_file(path, problem=MediaError, hint=hint)
    with reading(path, problem=MediaError, hint=hint), file.open("rb") as stream:
        if not stream.read(1):
            raise MediaError(f"{file} is empty")
    return file


def read_tags(path: Path) -> dict[str, str]:
    """Return the tags of a result, with those of its first picture for a folder. Raises FileProblem if it is broken."""
    import av
    from PIL import ExifTags, Image, UnidentifiedImageError

    try:
        file = min(path.glob("frame_*.png")) if path.is_dir() else path
        try:
            with Image.open(file, formats=("PNG", "GIF", "WEBP")) as picture:
                if picture.format == "PNG":
                    return {key: str(value) for key, value in getattr(picture, "text", {}).items()}
                if picture.format == "GIF":
                    return _parsed(picture.info.get("comment", b"").decode("utf-8", "replace"), key="comment")
                return _parsed(str(picture.getexif().get(ExifTags.Base.ImageDescription, "")), key="description")
        except UnidentifiedImageError:
            with av.open(str(file), metadata_errors="replace") as container:
                return {key: value for key, value in container.metadata.items() if key not in _MUXER_KEYS}
    except (OSError, ValueError, SyntaxError, EOFError, struct.error) as error:
        raise FileProblem(f"{shown_path(path)} cannot be read: {error}") from error


def _parsed(text: str, *, key: str) -> dict[str, str]:
    """Return the tags in `text`. Text of another program becomes one tag named `key`."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        return {str(name): str(value) for name, value in document.items()}
    return {key: text} if text else {}
