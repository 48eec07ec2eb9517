"""`osora data preview`: a contact sheet of the samples of a table."""

import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError, FileProblem, MediaError, OutputError
from opensora_cli.core.files import atomic_path
from opensora_cli.core.formatting import escaped
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.data.buckets import NO_BUCKET, Buckets
from opensora_cli.data.table import ClipTable, read_table
from opensora_cli.engine.encode.datasets import make_buckets
from opensora_cli.media.read import read_cut
from opensora_cli.settings.data import DataSettings, PreviewSettings

_COLUMNS = 3
_FRAMES = 3
_THUMBNAIL = (160, 110)
_GAP = 8
_FONT_SIZE = 13
_LINE = 17
_CAPTION_LINES = 2
_PAPER, _INK, _PALE = (250, 250, 248), (20, 20, 20), (120, 120, 120)
_CELL = (_FRAMES * (_THUMBNAIL[0] + 2), _THUMBNAIL[1] + (_CAPTION_LINES + 1) * _LINE + 4)
_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


class PreviewResult(Document):
    """Result of drawing a contact sheet."""

    SCHEMA = "osora.data-preview/1"

    sheet: Path
    shown: int
    rows: int
    broken: tuple[str, ...]
    """Errors of samples that could not be read."""

    def lines(self) -> list[str]:
        """Return the path of the sheet."""
        return [str(self.sheet)]

    def raise_for_problems(self) -> None:
        """Raise BatchError if samples could not be read."""
        if self.broken:
            count = f"{len(self.broken)} of {self.shown} samples cannot be read"
            raise BatchError("\n".join([count, *self.broken]))


def preview(
    settings: PreviewSettings, data: DataSettings, *, multiple: int, reporter: Reporter | None = None
) -> PreviewResult:
    """Make a contact sheet of some samples of a table: frames, caption, size and bucket.

    Sizes of buckets are multiples of `multiple`, the side of a token in pixels. Raises the errors of `make_buckets`,
    FileProblem if the table is empty, and OutputError if the picture exists already or cannot be written.
    """
    sheet = Path(settings.sheet)
    if os.path.lexists(sheet) and not settings.overwrite:
        raise OutputError(f"{sheet} exists already", hint="use --overwrite, or another --out")
    table = read_table(Path(settings.table))
    if not len(table):
        raise FileProblem(f"{settings.table} has no row that can be used")
    buckets = make_buckets(data.buckets, fps_max=data.fps_max, multiple=multiple)
    count = min(settings.count, len(table))
    chosen = np.sort(np.random.default_rng(settings.seed).choice(len(table), size=count, replace=False)).tolist()
    picture = Image.new("RGB", _sheet_size(count), _PAPER)
    broken: list[str] = []
    with (reporter or SilentReporter()).stage("draw", total=count, unit="samples") as progress:
        for place, index in enumerate(chosen):
            cell, problem = _draw_sample(table, index, label=_label(table, index, buckets))
            row, column = divmod(place, _COLUMNS)
            picture.paste(cell, (_GAP + column * (_CELL[0] + _GAP), _GAP + row * (_CELL[1] + _GAP)))
            broken += [problem] if problem else []
            progress.advance()
    with atomic_path(sheet) as temporary:
        picture.save(temporary, format=_FORMATS[sheet.suffix.lower()])
    return PreviewResult(sheet=sheet, shown=count, rows=len(table), broken=tuple(broken))


def _sheet_size(count: int) -> tuple[int, int]:
    rows, columns = -(-count // _COLUMNS), min(count, _COLUMNS)
    return _GAP + columns * (_CELL[0] + _GAP), _GAP + rows * (_CELL[1] + _GAP)


def _label(table: ClipTable, index: int, buckets: Buckets) -> str:
    """Return size, length, rate and bucket of a sample in one line."""
    samples = table.samples.only(np.arange(len(table)) == index)
    frames, fps = int(samples.num_frames[0]), float(samples.fps[0])
    size = f"{samples.width[0]}x{samples.height[0]}"
    length = "picture" if frames == 1 else f"{frames} frames" + ("" if np.isnan(fps) else f" at {fps:g}")
    reachable = [bucket for bucket in buckets.reachable(samples)[0].tolist() if bucket != NO_BUCKET]
    if not reachable:
        return f"{size}, {length}: no bucket"
    bucket = buckets[reachable[0]]
    shape = f"{bucket.aspect_ratio} ({bucket.width}x{bucket.height})"
    return f"{size}, {length}: {bucket.resolution} x {bucket.num_frames}, {shape}"


def _draw_sample(table: ClipTable, index: int, *, label: str) -> tuple[Image.Image, str | None]:
    """Return the cell of a sample, and the reason if its frames are missing."""
    cell = Image.new("RGB", _CELL, _PAPER)
    draw = ImageDraw.Draw(cell)
    font = ImageFont.load_default(size=_FONT_SIZE)
    problem = None
    try:
        frames = _thumbnails(table, index)
    except MediaError as error:
        frames, problem = [], error.message
        draw.rectangle((0, 0, *_THUMBNAIL), outline=_PALE)
        draw.text((6, 6), "cannot be read", fill=_PALE, font=font)
    left = 0
    for frame in frames:
        cell.paste(frame, (left, 0))
        left += frame.width + 2
    top = _THUMBNAIL[1] + 2
    draw.text((0, top), label, fill=_PALE, font=font)
    for number, line in enumerate(_wrapped(table.texts[index] or "(no caption)", font), start=1):
        draw.text((0, top + number * _LINE), line, fill=_INK, font=font)
    return cell, problem


def _thumbnails(table: ClipTable, index: int) -> list[Image.Image]:
    """Return small copies of the first, middle and last frame of a video, or of a picture."""
    last = int(table.samples.num_frames[index]) - 1
    thumbnails = []
    for start in dict.fromkeys((0, last // 2, last)):
        for frame in read_cut(table.file(index), start=start, num_frames=1):
            thumbnail = Image.fromarray(frame.numpy())
            thumbnail.thumbnail(_THUMBNAIL)
            thumbnails.append(thumbnail)
    return thumbnails


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """Return the first lines of a text, wrapped to the width of a cell."""
    lines = [""]
    for word in escaped(text).split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= _CELL[0]:
            lines[-1] = longer
        elif len(lines) == _CAPTION_LINES:
            lines[-1] += " ..."
            break
        else:
            lines.append(word)
    return lines
