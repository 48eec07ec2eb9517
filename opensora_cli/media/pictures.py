"""Read pictures, still and animated (GIF, WebP, APNG, AVIF), through Pillow."""

import struct
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from opensora_cli.core.exceptions import MediaError
from opensora_cli.core.formatting import plain
from opensora_cli.core.reading import lack_of_machine
from opensora_cli.media.containers import StoredFrame, VideoSource

_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""Errors of Pillow for broken files; caught only where nothing but Pillow runs."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF", "BMP", "TIFF", "JPEG2000", "PPM")
"""Formats that are read. Pillow also knows formats that start other programs, or that are videos."""

_ANIMATED_FORMATS = {"GIF", "WEBP", "PNG", "AVIF"}
"""Other formats (MPO of some phones, TIFF) hold several pictures that are not a video."""

_DEFAULT_DURATION_MS = 100
"""Duration of a frame that names none, as in browsers."""

_MOST_PIXELS = 2**35
"""Limit of pixels in all frames of an animation: 4142 frames of 3840 x 2160."""

_GROUND = "white"
"""Color behind transparent pictures, as most viewers show them."""


def num_pictures(path: Path) -> int:
    """Return 1 for a still picture, more for an animated one, 0 for other files. Raises MediaError if it is broken."""
    with _decoding(path):
        try:
            with Image.open(path, formats=_FORMATS) as picture:
                return len(_frame_numbers(picture))
        except UnidentifiedImageError:
            return 0


def read_first(path: Path) -> torch.Tensor:
    """Return the picture, or the first of an animation, as uint8 (H, W, 3). Raises MediaError if it is broken."""
    with _opened(path) as picture:
        return _rgb(picture, path, _frame_numbers(picture)[0])


@contextmanager
def open_animation(path: Path) -> Iterator[VideoSource]:
    """Open an animated picture as a video. Raises MediaError, also while frames are read, if it is broken."""
    with _opened(path) as picture:
        numbers, (width, height), durations_ms = _frame_numbers(picture), picture.size, list[int]()
        # A few bytes may fill any canvas, and take hours to decode.
        if len(numbers) * height * width > _MOST_PIXELS:
            raise MediaError(
                f"{path} has {len(numbers)} frames of {width} x {height} pixels, and at most {_MOST_PIXELS:,} pixels "
                "are read of an animated picture",
                hint="convert it to a video",
            )
        with _decoding(path):
            for number in numbers:
                picture.seek(number)
                picture.load()  # WebP has the duration only then.
                durations_ms.append(round(picture.info.get("duration") or 0) or _DEFAULT_DURATION_MS)
        mean_fps = 1000 * len(durations_ms) / sum(durations_ms)
        yield VideoSource(frames=_frames(picture, path, numbers, durations_ms), fps=mean_fps)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    with ExitStack() as stack:
        with _decoding(path):
            picture = stack.enter_context(Image.open(path, formats=_FORMATS))
        yield picture


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Translate the errors of Pillow for a broken picture."""
    try:
        yield
    except _BROKEN as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        broken = MediaError(f"{path} cannot be read as a picture: {plain(cause)}")
        raise lack_of_machine(error, path) or broken from error


def _frame_numbers(picture: Image.Image) -> range:
    """Return the numbers of the frames of a picture, without the one that an APNG holds for other programs."""
    if picture.format not in _ANIMATED_FORMATS:
        return range(1)
    return range(int(getattr(picture, "default_image", False)), getattr(picture, "n_frames", 1))


def _frames(picture: Image.Image, path: Path, numbers: range, durations_ms: list[int]) -> Iterator[StoredFrame]:
    time_ms = 0
    for number, duration_ms in zip(numbers, durations_ms, strict=True):
        rgb_HWC = _rgb(picture, path, number)
        yield StoredFrame(time_ms / 1000, duration_ms / 1000, rgb_HWC.detach)
        time_ms += duration_ms


def _rgb(picture: Image.Image, path: Path, number: int) -> torch.Tensor:
    """Return a frame as uint8 (H, W, 3), upright and on a white ground."""
    with _decoding(path):
        picture.seek(number)
        frame = ImageOps.exif_transpose(picture)
        if frame.mode == "F":
            raise MediaError(f"{path} holds floating point levels of unknown range", hint="convert it to an 8 bit PNG")
        if frame.mode.startswith("I"):
            # The conversion to RGB would clip 16 bits at 255.
            levels = np.clip(np.asarray(frame, dtype=np.int64), 0, 65535)
            frame = Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))
        return torch.from_numpy(np.array(_on_ground(frame)))


def _on_ground(frame: Image.Image) -> Image.Image:
    """Return a frame in RGB, its transparent parts filled."""
    if not frame.has_transparency_data:
        return frame.convert("RGB")
    frame = frame.convert("RGBA")
    ground = Image.new("RGB", frame.size, _GROUND)
    ground.paste(frame, mask=frame)
    return ground
