"""Write videos and pictures, whole or not at all; film strips and contact sheets are pictures of several."""

import errno
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain, count, islice, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import av
import numpy as np
import torch
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from PIL import GifImagePlugin, Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.exceptions import OutputError
from opensora_cli.media.containers import EXACT_COLORS
from opensora_cli.media.results import Describe, Extra, media_path, published


class LastFrame(NamedTuple):
    """Picture of the last frame of a video."""

    path: Path
    replace: bool
    """Whether a file of this name is replaced."""


_CRF = "23"
# The macroblock tree reads uninitialized memory, so that the bits of the output would change from run to run.
_X264 = "mbtree=0"
# The bits of the output depend on the number of threads, by default those of the machine.
_X264_THREADS = 2
_GIF_PALETTE_PIXELS = 1 << 14
_GIF_STEP_MS = 10
_JPEG_QUALITY = 90
_STRIP_FRAMES = 3
_GAP = 8
_SMALLEST_LETTERS = 10
_EMPTY_SIZE = (64, 192)
BACKGROUND, _LETTERS = (32, 32, 32), (240, 240, 240)


def write_media(
    pieces: Iterable[torch.Tensor],
    path: str | os.PathLike[str],
    *,
    fps: float,
    format: MediaFormat | str,
    metadata: Mapping[str, str] | None = None,
    replace: bool = True,
    describe: Describe | None = None,
    last_frame: LastFrame | None = None,
) -> Path:
    """Write exactly these frames, whole or not at all, and return the file or folder.

    The same frames give the same bytes. Each piece is written before the next is requested, and not kept. Only `gif`
    holds all frames, for their common palette.

    `mp4` is H.264, yuv420p (BT.709), crf 23, at a constant rate, with its index in front. `gif` is an endless
    animation. `png` is a picture for one frame. A longer video becomes a folder of lossless pictures `frame_0001.png`
    and so on, named like `path` without its ending.

    Args:
        pieces: Video, cut along time: uint8 RGB (t, H, W, 3) of one size. Errors of the iterator pass unchanged.
        path: File to write.
        format: mp4, gif or png, whatever the ending of `path`.
        metadata: Tags of the file: under these keys in an MP4 or PNG, as JSON in a GIF. In an MP4, `prompt` is also
            the title, and the other tags are the comment, unless given.
        replace: Whether existing files are replaced.
        describe: Returns the sidecar after the last frame; see `published`.
        last_frame: File for the last frame; only with `describe`.

    Raises:
        OutputError: A file cannot be written or must not be replaced, or H.264 cannot have this size.
    """
    last_HWC: list[torch.Tensor] = []
    failed: list[Exception] = []

    def watched() -> Iterator[torch.Tensor]:
        for frame_HWC in chain(start, frames):
            last_HWC[:] = [frame_HWC] if last_frame is not None else []
            yield frame_HWC
            del frame_HWC

    def extras() -> list[Extra]:
        return [] if last_frame is None else [Extra(last_frame.path, png_bytes(last_HWC[0], tags), last_frame.replace)]

    tags = {key: _storable(value) for key, value in (metadata or {}).items()}
    kind = MediaFormat(format)
    try:
        frames = _frames(pieces, failed)
        # The second frame tells a picture from a sequence.
        start = [*islice(frames, 2 if kind == MediaFormat.PNG else 1)]
        target = media_path(path, format=kind, num_frames=len(start))
        _refuse(target, kind, start)
        with published(target, replace=replace, describe=describe, extras=extras) as temporary:
            if len(start) > 1:
                temporary.mkdir()
                for number, frame in enumerate(watched(), start=1):
                    (temporary / f"frame_{number:04d}.png").write_bytes(png_bytes(frame, tags))
            elif kind == MediaFormat.PNG:
                temporary.write_bytes(png_bytes(next(watched()), tags))
            elif kind == MediaFormat.MP4:
                _write_mp4(watched(), temporary, fps=fps, tags=tags)
            else:
                temporary.write_bytes(gif_bytes(torch.stack([*watched()]), fps=fps, metadata=tags))
        return target
    except Exception:
        if not failed:
            raise
    # Outside of the handlers of errors in writing: it keeps its own causes.
    raise failed[0]


def _frames(pieces: Iterable[torch.Tensor], failed: list[Exception]) -> Iterator[torch.Tensor]:
    """Yield copies of the frames (H, W, 3) of pieces, so that a kept frame does not keep its piece.

    An error of the iterator is added to `failed`.
    """
    making = iter(pieces)
    while True:
        try:
            piece_THWC = next(making, None)
        except Exception as error:
            failed.append(error)
            raise
        if piece_THWC is None:
            break
        yield from map(torch.clone, piece_THWC.cpu().contiguous())
        del piece_THWC


def _refuse(target: Path, kind: MediaFormat, start: Sequence[torch.Tensor]) -> None:
    """Raise OutputError for a size that H.264 cannot have, and for a folder with other files."""
    height, width, _ = start[0].shape
    if kind == MediaFormat.MP4 and (height % 2 or width % 2):
        raise OutputError(
            f"cannot write {target}: H.264 needs an even width and height, not {width}x{height}",
            hint="choose an even size, or --format gif or png",
        )
    if len(start) > 1 and target.is_dir():
        others = sorted(entry.name for entry in target.iterdir() if not re.fullmatch(r"frame_\d+\.png", entry.name))
        if others:
            raise OutputError(
                f"cannot write {target}: it holds other files than a sequence of frames, such as {others[0]}",
                hint="choose another name with --out",
            )


def _write_mp4(frames: Iterator[torch.Tensor], path: Path, *, fps: float, tags: Mapping[str, str]) -> None:
    rate = Fraction(fps).limit_denominator(1001)
    try:
        # use_metadata_tags: without it MP4 keeps only the few keys that iTunes knows.
        options = {"movflags": "+faststart+use_metadata_tags"}
        with av.open(str(path.absolute()), mode="w", format="mp4", options=options) as container:
            container.metadata.update(_mp4_tags(tags))
            first_HWC = next(frames)
            track = container.add_stream("libx264", rate=rate, options={"crf": _CRF, "x264-params": _X264})
            track.height, track.width, _ = first_HWC.shape
            track.pix_fmt = "yuv420p"
            track.codec_context.thread_count = _X264_THREADS
            track.codec_context.thread_type = "FRAME"
            track.codec_context.colorspace = Colorspace.ITU709
            track.codec_context.color_primaries = ColorPrimaries.BT709
            track.codec_context.color_trc = ColorTrc.BT709
            track.codec_context.color_range = ColorRange.MPEG
            for index, frame in enumerate(chain([first_HWC], frames)):
                container.mux(track.encode(_yuv_frame(frame, index, rate)))
            container.mux(track.encode(None))
    except av.FFmpegError as error:
        # PyAV raises OSError only for some system errors, and not for a full disk.
        if error.errno is None or error.errno not in errno.errorcode:
            raise
        raise OSError(error.errno, os.strerror(error.errno)) from error


def _yuv_frame(frame_HWC: torch.Tensor, index: int, rate: Fraction) -> av.VideoFrame:
    frame = av.VideoFrame.from_ndarray(frame_HWC.numpy(), format="rgb24").reformat(
        format="yuv420p",
        dst_colorspace=Colorspace.ITU709,
        dst_color_range=ColorRange.MPEG,
        interpolation=EXACT_COLORS,
    )
    frame.pts, frame.time_base = index, 1 / rate
    return frame


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
    ends = (round(1000 * index / fps / _GIF_STEP_MS) * _GIF_STEP_MS for index in count())
    durations = (max(2 * _GIF_STEP_MS, end - start) for start, end in pairwise(ends))
    palette = _shared_palette(frames_THWC)
    indexed = (
        Image.fromarray(frame.numpy()).quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG)
        for frame in frames_THWC
    )
    stream = io.BytesIO()
    comment = {"comment": json.dumps(dict(metadata))} if metadata else {}
    next(indexed).save(stream, format="GIF", loop=0, optimize=False, duration=next(durations), **comment)
    start, trailer = stream.getvalue()[:-1], stream.getvalue()[-1:]
    blocks = [
        block
        for frame, duration in zip(indexed, durations, strict=False)
        for block in GifImagePlugin.getdata(frame, duration=duration)
    ]
    return b"".join([start, *blocks, trailer])


def _shared_palette(frames_THWC: torch.Tensor) -> Image.Image:
    """Return a picture whose palette suits all frames, since colors that differ from frame to frame flicker."""
    pixels = frames_THWC.reshape(-1, 3)
    # An odd step does not always meet the same columns.
    step = max(1, len(pixels) // _GIF_PALETTE_PIXELS) | 1
    sample = np.ascontiguousarray(pixels[::step].numpy()[None])
    return Image.fromarray(sample).quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=1)


def _mp4_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return `tags`, with the two that every player shows."""
    if not tags:
        return {}
    others = "; ".join(f"{key}: {value}" for key, value in tags.items() if key not in ("prompt", "title", "comment"))
    shown = {"title": tags.get("prompt", ""), "comment": others}
    return {key: value for key, value in shown.items() if value} | dict(tags)


def _storable(text: str) -> str:
    # No format holds a zero byte. Lone surrogates come from arguments that are not UTF-8.
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")


def film_strip(frames_THWC: torch.Tensor) -> torch.Tensor:
    """Return the first, middle and last of uint8 RGB frames side by side; fewer for a shorter clip."""
    count = len(frames_THWC)
    chosen = torch.linspace(0, count - 1, min(count, _STRIP_FRAMES)).round().long()
    return torch.cat([*frames_THWC[chosen]], dim=1)


def contact_sheet(cells: Sequence[tuple[str, torch.Tensor | None]]) -> torch.Tensor:
    """Return uint8 RGB pictures (H, W, 3) on about a square, each below the lines of its label; None stays empty."""
    sizes = [tuple(picture_HWC.shape[:2]) for _, picture_HWC in cells if picture_HWC is not None] or [_EMPTY_SIZE]
    height, width = (max(size[axis] for size in sizes) for axis in range(2))
    letters = max(_SMALLEST_LETTERS, height // 9)
    label_height = max(label.count("\n") + 1 for label, _ in cells) * (letters + 6)
    cell_height, cell_width = height + label_height + _GAP, width + _GAP
    columns = max(1, min(len(cells), round(math.sqrt(len(cells) * cell_height / cell_width))))
    rows = math.ceil(len(cells) / columns)
    sheet = Image.new("RGB", (columns * cell_width + _GAP, rows * cell_height + _GAP), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    for index, (label, picture_HWC) in enumerate(cells):
        left, top = _GAP + index % columns * cell_width, _GAP + index // columns * cell_height
        draw.text((left, top), label, fill=_LETTERS, font_size=letters)
        if picture_HWC is not None:
            sheet.paste(Image.fromarray(picture_HWC.numpy()), (left, top + label_height))
    return torch.from_numpy(np.array(sheet))
