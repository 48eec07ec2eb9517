"""GIF and WebP animations, assembled frame by frame.

Pillow's and libwebp's own animation writers merge frames that look alike. A video has exactly the frames it was given,
so here each frame is compressed on its own and the container is put together around them.
"""

import io
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, pairwise

import numpy as np
import torch
from PIL import ExifTags, GifImagePlugin, Image

_GIF_COLOURS = 256
_GIF_PALETTE_PIXELS = 1 << 14
_GIF_SHORTEST_MS = 20
"""Browsers show anything shorter at ten frames a second."""

_WEBP_QUALITY = 90


def gif_bytes(frames_THWC: torch.Tensor, *, fps: float, metadata: Mapping[str, str]) -> bytes:
    """Return an endless GIF of uint8 RGB frames, in one palette for all, with `metadata` as JSON in its comment.

    GIF counts hundredths of a second: single frames last a hundredth more or less so that the whole keeps its length.
    """
    durations = _durations_ms(fps, step=10, shortest=_GIF_SHORTEST_MS)
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
    """Return an endless WebP animation of uint8 RGB frames (H, W, 3), each taken once the one before is compressed.

    `metadata` is JSON in EXIF's ImageDescription.

    The container: https://developers.google.com/speed/webp/docs/riff_container
    """
    shown = []
    for frame, duration in zip(frames, _durations_ms(fps, step=1, shortest=1), strict=False):
        height, width, _ = frame.shape
        size = _uint24(width - 1) + _uint24(height - 1)
        no_blending = 0x02
        place = _uint24(0) + _uint24(0) + size + _uint24(duration) + bytes([no_blending])
        shown.append(_chunk(b"ANMF", place + _webp_still(frame)))
    animation_flag, exif_flag = 0x02, 0x08
    chunks = [
        _chunk(b"VP8X", bytes([animation_flag | (exif_flag if metadata else 0), 0, 0, 0]) + size),
        _chunk(b"ANIM", bytes(4) + struct.pack("<H", 0)),  # background colour; 0: loop for ever
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


def _durations_ms(fps: float, *, step: int, shortest: int) -> Iterator[int]:
    """Yield without end how long each frame lasts, in multiples of `step` ms whose sums follow the true times."""
    ends = (round(1000 * index / fps / step) * step for index in count())
    return (max(shortest, end - start) for start, end in pairwise(ends))


def _shared_palette(frames_THWC: torch.Tensor) -> Image.Image:
    """Return a picture whose palette suits all frames: colours that differ from frame to frame flicker."""
    pixels = frames_THWC.reshape(-1, 3)
    # An odd step, so that it does not always meet the same columns.
    step = max(1, len(pixels) // _GIF_PALETTE_PIXELS) | 1
    sample = np.ascontiguousarray(pixels[::step].numpy()[None])
    return Image.fromarray(sample).quantize(_GIF_COLOURS, method=Image.Quantize.MEDIANCUT, kmeans=1)


def _ascii_json(metadata: Mapping[str, str]) -> str:
    # GIF comments and EXIF descriptions are ASCII by their standards; JSON's escapes carry every language through.
    return json.dumps(dict(metadata), ensure_ascii=True)


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)


def _uint24(value: int) -> bytes:
    return value.to_bytes(3, "little")
