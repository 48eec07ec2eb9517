"""Pictures, still and animated (GIF, WebP, APNG), through Pillow."""

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from opensora_cli.core.exceptions import MediaError
from opensora_cli.media.frames import VideoSource

BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
"""What Pillow raises for broken files, by format."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF", "BMP", "TIFF", "JPEG2000", "PPM")
"""Pillow also knows formats that it tells by almost nothing, that start other programs, or that are videos."""

_ANIMATED_FORMATS = {"GIF", "WEBP", "PNG", "AVIF"}
"""Others (MPO of some phones, TIFF) hold several pictures that are not a video."""

_DEFAULT_DURATION_MS = 100
"""What browsers take for a GIF that gives none."""


def num_pictures(path: Path) -> int:
    """Return 1 for a still picture, more for an animated one, 0 if `path` is no picture at all.

    Raises:
        MediaError: a picture that is broken.
    """
    try:
        with Image.open(path, formats=FORMATS) as picture:
            return getattr(picture, "n_frames", 1) if picture.format in _ANIMATED_FORMATS else 1
    except UnidentifiedImageError:
        return 0
    except BROKEN as error:
        raise _broken(path, error) from error


def read_first(path: Path) -> torch.Tensor:
    """Return the picture, or the first of an animation, as uint8 (H, W, 3).

    Raises:
        MediaError: broken.
    """
    try:
        with Image.open(path, formats=FORMATS) as picture:
            return _rgb(picture, path)
    except BROKEN as error:
        raise _broken(path, error) from error


@contextmanager
def open_animation(path: Path) -> Iterator[VideoSource]:
    """Open an animated picture as a video.

    Raises:
        MediaError: broken; also while its frames are read.
    """
    try:
        with Image.open(path, formats=FORMATS) as picture:
            durations_ms = _durations_ms(picture)
            mean_fps = 1000 * len(durations_ms) / sum(durations_ms)
            yield VideoSource(frames=_frames(picture, path, durations_ms), fps=mean_fps)
    except BROKEN as error:
        raise _broken(path, error) from error


@dataclass(frozen=True)
class _PictureFrame:
    picture_HWC: torch.Tensor
    time: float
    duration: float

    def to_rgb(self) -> torch.Tensor:
        return self.picture_HWC


def _durations_ms(picture: Image.Image) -> list[int]:
    """Return for how many milliseconds each frame is shown."""
    durations = []
    for index in range(getattr(picture, "n_frames", 1)):
        picture.seek(index)
        picture.load()  # WebP knows the duration only then
        durations.append(round(picture.info.get("duration") or _DEFAULT_DURATION_MS))
    return durations


def _frames(picture: Image.Image, path: Path, durations_ms: list[int]) -> Iterator[_PictureFrame]:
    time_ms = 0
    for index, duration_ms in enumerate(durations_ms):
        picture.seek(index)
        yield _PictureFrame(_rgb(picture, path), time_ms / 1000, duration_ms / 1000)
        time_ms += duration_ms


def _rgb(picture: Image.Image, path: Path) -> torch.Tensor:
    """Return the current frame as uint8 (H, W, 3), upright."""
    upright = ImageOps.exif_transpose(picture)
    if upright.mode.startswith("I"):
        # Sixteen bits of grey: Pillow's own conversion would clip them at 255.
        levels = np.clip(np.asarray(upright, dtype=np.int64), 0, 65535)
        grey = ((levels * 255 + 32767) // 65535).astype(np.uint8)
        return torch.from_numpy(np.repeat(grey[..., None], 3, axis=2))
    if upright.mode == "F":
        raise MediaError(f"{path} holds floating point levels of unknown range", hint="convert it to an 8 bit PNG")
    return torch.from_numpy(np.array(upright.convert("RGB")))


def _broken(path: Path, error: Exception) -> MediaError:
    cause = str(error).splitlines()[0] if str(error) else type(error).__name__
    return MediaError(f"{path} is a broken picture: {cause}")
