"""Reading back what `write_media` noted inside a file."""

import json
import os
from pathlib import Path

import av
from PIL import ExifTags, Image, UnidentifiedImageError

_MUXER_KEYS = {"major_brand", "minor_version", "compatible_brands", "encoder"}


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata of a video or picture: what `write_media` was given, for MP4 also `title` and `comment`.

    Of a folder of numbered pictures, that of the first.
    """
    file = Path(path)
    if file.is_dir():
        file = min(file.glob("frame_*.png"))
    try:
        with Image.open(file) as picture:
            return _picture_metadata(picture)
    except UnidentifiedImageError:
        with av.open(str(file), metadata_errors="replace") as container:
            return {key: value for key, value in container.metadata.items() if key not in _MUXER_KEYS}


def _picture_metadata(picture: Image.Image) -> dict[str, str]:
    if picture.format == "GIF":
        return _parsed(picture.info.get("comment", b"").decode("utf-8", "replace"), key="comment")
    if picture.format == "PNG":
        return {key: str(value) for key, value in getattr(picture, "text", {}).items()}
    return _parsed(str(picture.getexif().get(ExifTags.Base.ImageDescription, "")), key="description")


def _parsed(text: str, *, key: str) -> dict[str, str]:
    """Return `text` as the JSON object that we wrote, or, if somebody else wrote it, under `key`."""
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if isinstance(document, dict):
        return {str(name): str(value) for name, value in document.items()}
    return {key: text} if text else {}
