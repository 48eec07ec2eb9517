"""Encode frames as pictures, still and animated (GIF, WebP), through Pillow."""

import io
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, pairwise
from types import MappingProxyType

import numpy as np
import torch
from PIL import ExifTags, GifImagePlugin, Image
from PIL.PngImagePlugin import PngInfo

from opensora_cli.media.pictures import SHORTEST_MS

_GIF_COLORS = 256
_GIF_PALETTE_PIXELS = 1 << 14
_GIF_STEP_MS = 10
_JPEG_QUALITY = 90
_WEBP_QUALITY = 90


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
    for frame, duration in zip(frames, _frame_lengths_ms(fps, step=1, shortest=SHORTEST_MS), strict=False):
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
