"""Read and encode pictures, still and animated (GIF, WebP, APNG), through imageio.

Pillow, which imageio uses, is called directly where imageio has no option: to try only the decoders of `_FORMATS`, for
one palette of all frames of a GIF, and for metadata.
"""

import io
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import imageio.v3 as iio
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, GifImagePlugin, Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from opensora_cli.core.exceptions import MediaError
from opensora_cli.core.formatting import plain
from opensora_cli.core.reading import lack_of_machine
from opensora_cli.media.containers import VideoSource

_BROKEN = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError),
    *(EOFError, struct.error, zlib.error, Image.DecompressionBombError),
)
"""Errors of Pillow for broken files; caught only where nothing but Pillow runs."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF", "BMP", "TIFF", "JPEG2000", "PPM")
"""Formats that are read. Pillow also knows formats that start other programs, or that are videos."""

_ANIMATED_FORMATS = {"GIF", "WEBP", "PNG", "AVIF"}
"""Other formats (MPO of some phones, TIFF) hold several pictures that are not a video."""

_DEFAULT_DURATION_MS = 100
"""Duration in browsers for a GIF without one."""

_MOST_PIXELS = 2**35
"""Limit of pixels in all frames of an animation: 4142 frames of 3840 x 2160."""

_GIF_COLORS = 256
_GIF_PALETTE_PIXELS = 1 << 14
_GIF_SHORTEST_MS = 20
"""Browsers show shorter frames at ten frames a second."""

_JPEG_QUALITY = 90
_WEBP_QUALITY = 90

_UPRIGHT: Mapping[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    2: lambda picture: picture[:, ::-1],
    3: lambda picture: picture[::-1, ::-1],
    4: lambda picture: picture[::-1],
    5: lambda picture: picture.swapaxes(0, 1),
    6: lambda picture: picture.swapaxes(0, 1)[:, ::-1],
    7: lambda picture: picture.swapaxes(0, 1)[::-1, ::-1],
    8: lambda picture: picture.swapaxes(0, 1)[::-1],
}
"""Functions that turn a picture (H, W, 3) upright, by EXIF orientation. imageio mistakes the axes of gray pictures."""


def num_pictures(path: Path) -> int:
    """Return 1 for a still picture, more for an animated one, 0 for other files. Raises MediaError if it is broken."""
    with _decoding(path):
        try:
            with Image.open(path, formats=_FORMATS) as picture:
                return getattr(picture, "n_frames", 1) if picture.format in _ANIMATED_FORMATS else 1
        except UnidentifiedImageError:
            return 0


def read_first(path: Path) -> torch.Tensor:
    """Return the picture, or the first of an animation, as uint8 (H, W, 3). Raises MediaError if it is broken."""
    with _opened(path) as picture:
        return _rgb(picture, path, 0)


@contextmanager
def open_animation(path: Path) -> Iterator[VideoSource]:
    """Open an animated picture as a video. Raises MediaError, also while frames are read, if it is broken."""
    with _opened(path) as picture:
        with _decoding(path):
            _require_size(picture, path)
            durations_ms = _durations_ms(picture)
        mean_fps = 1000 * len(durations_ms) / sum(durations_ms)
        yield VideoSource(frames=_frames(picture, path, durations_ms), fps=mean_fps)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with ExitStack() as stack:
        with _decoding(path):
            # Open as a file because imageio treats a path such as `http:x` or `a.zip/b.png` in another way.
            file = stack.enter_context(path.open("rb"))
            Image.open(file, formats=_FORMATS)
            file.seek(0)
            picture = stack.enter_context(iio.imopen(file, "r", plugin="pillow"))
        yield picture


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Translate the errors of Pillow for a broken picture."""
    try:
        yield
    except _BROKEN as error:
        raise lack_of_machine(error, path) or _broken(path, error) from error


@dataclass(frozen=True)
class _PictureFrame:
    picture_HWC: torch.Tensor
    time: float
    duration: float

    def to_rgb(self) -> torch.Tensor:
        return self.picture_HWC


def _require_size(picture: Any, path: Path) -> None:
    """Raise MediaError for an animation that takes hours to decode, since a few bytes may fill any canvas."""
    stored = picture.properties(index=...)
    height, width = stored.shape[1:3]
    if stored.n_images * height * width > _MOST_PIXELS:
        raise MediaError(
            f"{path} has {stored.n_images} frames of {width} x {height} pixels, and at most {_MOST_PIXELS:,} pixels "
            "are read of an animated picture",
            hint="convert it to a video",
        )


def _durations_ms(picture: Any) -> list[int]:
    """Return the duration of each frame in milliseconds."""
    durations = []
    for index in range(picture.properties(index=...).n_images):
        picture.read(index=index)  # WebP has the duration only then.
        durations.append(round(picture.metadata(index=index).get("duration") or _DEFAULT_DURATION_MS))
    return durations


def _frames(picture: Any, path: Path, durations_ms: list[int]) -> Iterator[_PictureFrame]:
    time_ms = 0
    for index, duration_ms in enumerate(durations_ms):
        yield _PictureFrame(_rgb(picture, path, index), time_ms / 1000, duration_ms / 1000)
        time_ms += duration_ms


def _rgb(picture: Any, path: Path, index: int) -> torch.Tensor:
    """Return a frame as uint8 (H, W, 3), upright."""
    with _decoding(path):
        noted = picture.metadata(index=index, exclude_applied=False)
        is_gray_16 = noted["mode"].startswith("I")
        stored = picture.read(index=index, mode=None if is_gray_16 else "RGB")
    if noted["mode"] == "F":
        raise MediaError(f"{path} holds floating point levels of unknown range", hint="convert it to an 8 bit PNG")
    rgb = stored
    if is_gray_16:
        # The conversion to RGB would clip them at 255.
        levels = np.clip(stored.astype(np.int64), 0, 65535)
        gray = ((levels * 255 + 32767) // 65535).astype(np.uint8)
        rgb = np.repeat(gray[..., None], 3, axis=2)
    turn = _UPRIGHT.get(noted.get("Orientation", 1))
    return torch.from_numpy(rgb if turn is None else np.ascontiguousarray(turn(rgb)))


def _broken(path: Path, error: Exception) -> MediaError:
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    return MediaError(f"{path} is a broken picture: {plain(cause)}")


def save_png(frame_HWC: torch.Tensor, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the file of `png_bytes`."""
    path.write_bytes(png_bytes(frame_HWC, metadata))


def png_bytes(frame_HWC: torch.Tensor, metadata: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Return a uint8 RGB frame as a PNG file, with `metadata` as text chunks."""
    info = PngInfo()
    for key, value in metadata.items():
        info.add_text(key, value)
    return bytes(iio.imwrite("<bytes>", frame_HWC.numpy(), plugin="pillow", extension=".png", pnginfo=info))


def jpeg_bytes(frame_HWC: torch.Tensor, *, longest_side: int) -> bytes:
    """Return a uint8 RGB frame as a JPEG file, scaled down to `longest_side` pixels if necessary."""
    picture = Image.fromarray(frame_HWC.numpy())
    picture.thumbnail((longest_side, longest_side))
    stream = io.BytesIO()
    picture.save(stream, format="JPEG", quality=_JPEG_QUALITY)
    return stream.getvalue()


def gif_bytes(frames_THWC: torch.Tensor, *, fps: float, metadata: Mapping[str, str]) -> bytes:
    """Return an endless GIF of uint8 RGB frames with one palette, and `metadata` as JSON in its comment.

    Pillow's writer, which imageio calls, merges equal frames. Here each frame is compressed alone, so that all are in
    the file. GIF counts hundredths of a second: single frames last a hundredth more or less, so that the whole keeps
    its length.
    """
    durations = _frame_lengths_ms(fps, step=10, shortest=_GIF_SHORTEST_MS)
    palette = _shared_palette(frames_THWC)
    indexed = (
        Image.fromarray(frame.numpy()).quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG)
        for frame in frames_THWC
    )
    stream = io.BytesIO()
    comment = {"comment": _ascii_json(metadata)} if metadata else {}
    next(indexed).save(stream, format="GIF", loop=0, optimize=False, duration=next(durations), **comment)
    start, trailer = stream.getvalue()[:-1], stream.getvalue()[-1:]
    blocks = [
        block
        for frame, duration in zip(indexed, durations, strict=False)
        for block in GifImagePlugin.getdata(frame, duration=duration)
    ]
    return b"".join([start, *blocks, trailer])


def webp_bytes(frames: Iterable[torch.Tensor], *, fps: float, metadata: Mapping[str, str]) -> bytes:
    """Return an endless WebP animation of uint8 RGB frames (H, W, 3), of which one at a time is in memory.

    `metadata` is JSON in EXIF's ImageDescription. As in `gif_bytes`, no frames are merged. The container is described
    at https://developers.google.com/speed/webp/docs/riff_container
    """
    shown = []
    for frame, duration in zip(frames, _frame_lengths_ms(fps, step=1, shortest=1), strict=False):
        height, width, _ = frame.shape
        size = _uint24(width - 1) + _uint24(height - 1)
        no_blending = 0x02
        place = _uint24(0) + _uint24(0) + size + _uint24(duration) + bytes([no_blending])
        shown.append(_chunk(b"ANMF", place + _webp_still(frame)))
    animation_flag, exif_flag = 0x02, 0x08
    chunks = [
        _chunk(b"VP8X", bytes([animation_flag | (exif_flag if metadata else 0), 0, 0, 0]) + size),
        _chunk(b"ANIM", bytes(4) + struct.pack("<H", 0)),  # Background color; 0 loops forever.
        *shown,
    ]
    if metadata:
        exif = Image.Exif()
        exif[ExifTags.Base.ImageDescription] = _ascii_json(metadata)
        chunks.append(_chunk(b"EXIF", exif.tobytes().removeprefix(b"Exif\0\0")))
    return _chunk(b"RIFF", b"WEBP" + b"".join(chunks))


def _webp_still(frame_HWC: torch.Tensor) -> bytes:
    """Return the chunks of one compressed frame, without their RIFF header."""
    still = iio.imwrite("<bytes>", frame_HWC.numpy(), plugin="pillow", extension=".webp", quality=_WEBP_QUALITY)
    return bytes(still)[12:]


def _frame_lengths_ms(fps: float, *, step: int, shortest: int) -> Iterator[int]:
    """Yield durations of frames without end, in multiples of `step` ms, whose sums follow the true times."""
    ends = (round(1000 * index / fps / step) * step for index in count())
    return (max(shortest, end - start) for start, end in pairwise(ends))


def _shared_palette(frames_THWC: torch.Tensor) -> Image.Image:
    """Return a picture whose palette suits all frames, since colors that differ from frame to frame flicker."""
    pixels = frames_THWC.reshape(-1, 3)
    # An odd step does not always meet the same columns.
    step = max(1, len(pixels) // _GIF_PALETTE_PIXELS) | 1
    sample = np.ascontiguousarray(pixels[::step].numpy()[None])
    return Image.fromarray(sample).quantize(_GIF_COLORS, method=Image.Quantize.MEDIANCUT, kmeans=1)


def _ascii_json(metadata: Mapping[str, str]) -> str:
    # GIF comments and EXIF descriptions are ASCII. The escapes of JSON carry every language.
    return json.dumps(dict(metadata), ensure_ascii=True)


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)


def _uint24(value: int) -> bytes:
    return value.to_bytes(3, "little")
