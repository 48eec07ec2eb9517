"""Read and encode pictures, still and animated (GIF, WebP, APNG, AVIF), through Pillow."""

import io
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from PIL import ExifTags, GifImagePlugin, Image, ImageCms, ImageOps, UnidentifiedImageError
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

_SHORTEST_MS = 11
"""Shortest duration of a frame of an animation. Browsers take `_DEFAULT_DURATION_MS` for shorter ones."""
_DEFAULT_DURATION_MS = 100

_MOST_PIXELS = 2**35
"""Limit of pixels in all frames of an animation: 4142 frames of 3840 x 2160."""

_GROUND = "white"
"""Color behind transparent pictures, as most viewers show them."""

_GIF_COLORS = 256
_GIF_PALETTE_PIXELS = 1 << 14
_GIF_STEP_MS = 10
_JPEG_QUALITY = 90
_WEBP_QUALITY = 90


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
        numbers = _frame_numbers(picture)
        _require_size(picture, path, num_frames=len(numbers))
        with _decoding(path):
            durations_ms = [_duration_ms(picture, number) for number in numbers]
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
    except Image.DecompressionBombError as error:
        found = int("".join(re.findall(r"[0-9]+", str(error))[:1]) or 0)
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        message = f"{path} has {found / 1e6:.4g} megapixels, more than the {most / 1e6:.3g} that are read"
        raise MediaError(message, hint="make it smaller") from error
    except _BROKEN as error:
        raise lack_of_machine(error, path) or _broken(path, error) from error


def _broken(path: Path, error: Exception) -> MediaError:
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    return MediaError(f"{path} is a broken picture: {plain(cause)}")


def _frame_numbers(picture: Image.Image) -> range:
    """Return the numbers of the frames of a picture, without the one that an APNG holds for other programs."""
    if picture.format not in _ANIMATED_FORMATS:
        return range(1)
    return range(int(getattr(picture, "default_image", False)), getattr(picture, "n_frames", 1))


@dataclass(frozen=True)
class _PictureFrame:
    picture_HWC: torch.Tensor
    time: float
    duration: float

    def to_rgb(self) -> torch.Tensor:
        return self.picture_HWC


def _require_size(picture: Image.Image, path: Path, *, num_frames: int) -> None:
    """Raise MediaError for an animation that takes hours to decode, since a few bytes may fill any canvas."""
    width, height = picture.size
    if num_frames * height * width > _MOST_PIXELS:
        raise MediaError(
            f"{path} has {num_frames} frames of {width} x {height} pixels, and at most {_MOST_PIXELS:,} pixels "
            "are read of an animated picture",
            hint="convert it to a video",
        )


def _duration_ms(picture: Image.Image, number: int) -> int:
    """Return the duration for which browsers show a frame."""
    picture.seek(number)
    picture.load()  # WebP has the duration only then.
    duration = round(picture.info.get("duration") or 0)
    return duration if duration >= _SHORTEST_MS else _DEFAULT_DURATION_MS


def _frames(picture: Image.Image, path: Path, numbers: range, durations_ms: list[int]) -> Iterator[_PictureFrame]:
    time_ms = 0
    for number, duration_ms in zip(numbers, durations_ms, strict=True):
        yield _PictureFrame(_rgb(picture, path, number), time_ms / 1000, duration_ms / 1000)
        time_ms += duration_ms


def _rgb(picture: Image.Image, path: Path, number: int) -> torch.Tensor:
    """Return a frame as uint8 (H, W, 3), upright, in sRGB and on a white ground."""
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
    """Return a frame in the colors of sRGB, its transparent parts filled."""
    opacity = None
    if frame.has_transparency_data:
        frame = frame.convert("RGBA")
        opacity = frame.getchannel("A")
    if frame.mode in ("RGBA", "P"):
        frame = frame.convert("RGB")
    rgb = _in_srgb(frame)
    if opacity is None:
        return rgb
    ground = Image.new("RGB", rgb.size, _GROUND)
    ground.paste(rgb, mask=opacity)
    return ground


def _in_srgb(frame: Image.Image) -> Image.Image:
    """Return a frame converted from its color profile; a profile that does not suit it is ignored, as by browsers."""
    stored = frame.info.get("icc_profile")
    if stored:
        try:
            profile = ImageCms.ImageCmsProfile(io.BytesIO(stored))
            if "sRGB" not in ImageCms.getProfileDescription(profile):
                converted = ImageCms.profileToProfile(frame, profile, ImageCms.createProfile("sRGB"), outputMode="RGB")
                if converted is not None:
                    return converted
        except (ImageCms.PyCMSError, OSError, ValueError):
            pass
    return frame.convert("RGB")


def save_png(frame_HWC: torch.Tensor, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the file of `png_bytes`."""
    path.write_bytes(png_bytes(frame_HWC, metadata))


def png_bytes(frame_HWC: torch.Tensor, metadata: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Return a uint8 RGB frame as a PNG file, with `metadata` as text chunks."""
    info = PngInfo()
    for key, value in metadata.items():
        info.add_text(key, value)
    stream = io.BytesIO()
    Image.fromarray(frame_HWC.numpy()).save(stream, format="PNG", pnginfo=info)
    return stream.getvalue()


def jpeg_bytes(frame_HWC: torch.Tensor, *, longest_side: int) -> bytes:
    """Return a uint8 RGB frame as a JPEG file, scaled down to `longest_side` pixels if necessary."""
    picture = Image.fromarray(frame_HWC.numpy())
    picture.thumbnail((longest_side, longest_side))
    stream = io.BytesIO()
    picture.save(stream, format="JPEG", quality=_JPEG_QUALITY)
    return stream.getvalue()


def gif_bytes(frames_THWC: torch.Tensor, *, fps: float, metadata: Mapping[str, str]) -> bytes:
    """Return an endless GIF of uint8 RGB frames with one palette, and `metadata` as JSON in its comment.

    Pillow's own writer merges equal frames. Here each frame is compressed alone, so that all are in
    the file. GIF counts hundredths of a second: single frames last a hundredth more or less, so that the whole keeps
    its length.
    """
    durations = _frame_lengths_ms(fps, step=_GIF_STEP_MS, shortest=2 * _GIF_STEP_MS)
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
    for frame, duration in zip(frames, _frame_lengths_ms(fps, step=1, shortest=_SHORTEST_MS), strict=False):
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
    stream = io.BytesIO()
    Image.fromarray(frame_HWC.numpy()).save(stream, format="WEBP", quality=_WEBP_QUALITY)
    return stream.getvalue()[12:]


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
