"""Reader of the tags that `write_media` wrote to a file: prompt, seed and more. It does not need torch."""

import json
import struct
from pathlib import Path

import av
from PIL import ExifTags, Image, UnidentifiedImageError

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.core.formatting import shown_path

_MUXER_KEYS = {"major_brand", "minor_version", "compatible_brands", "encoder"}
_FORMATS = ("PNG", "GIF", "WEBP")


def read_tags(path: Path) -> dict[str, str]:
    """Return the tags of a video or picture. Tags of MP4 include `title` and `comment`.

    A folder of numbered pictures has the tags of its first one. Raises FileProblem if the file is missing or broken.
    """
    try:
        file = min(path.glob("frame_*.png")) if path.is_dir() else path
        try:
            with Image.open(file, formats=_FORMATS) as picture:
                return _picture_tags(picture)
        except UnidentifiedImageError:
            with av.open(str(file), metadata_errors="replace") as container:
                return {key: value for key, value in container.metadata.items() if key not in _MUXER_KEYS}
    except (OSError, ValueError, SyntaxError, EOFError, struct.error) as error:
        raise FileProblem(f"{shown_path(path)} cannot be read: {error}") from error


def _picture_tags(picture: Image.Image) -> dict[str, str]:
    if picture.format == "GIF":
        return _parsed(picture.info.get("comment", b"").decode("utf-8", "replace"), key="comment")
    if picture.format == "PNG":
        return {key: str(value) for key, value in getattr(picture, "text", {}).items()}
    return _parsed(str(picture.getexif().get(ExifTags.Base.ImageDescription, "")), key="description")


def _parsed(text: str, *, key: str) -> dict[str, str]:
    """Return the tags in `text`. Text of another program becomes one tag named `key`."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        return {str(name): str(value) for name, value in document.items()}
    return {key: text} if text else {}
