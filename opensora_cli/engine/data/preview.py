"""`osora data preview`: a contact sheet of the samples of a table."""

import os
import textwrap
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError, FileProblem, MediaError, OutputError
from opensora_cli.core.files import atomic_path
from opensora_cli.core.formatting import escaped
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.data.buckets import NO_BUCKET, Buckets
from opensora_cli.data.table import ClipTable, read_table
from opensora_cli.engine.encode.datasets import make_buckets
from opensora_cli.media.read import read_cut
from opensora_cli.media.sheets import BACKGROUND, contact_sheet
from opensora_cli.settings.data import DataSettings, PreviewSettings

_FRAME = (160, 110)
_LETTERS = 76
"""Number of letters in a line."""
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
    """Make a contact sheet of some samples of a table: frames, name, size, bucket and caption."""
    sheet = Path(settings.sheet)
    if os.path.lexists(sheet) and not settings.overwrite:
        raise OutputError(f"{sheet} exists already", hint="use --overwrite, or another --out")
    table = read_table(Path(settings.table))
    if not len(table):
        raise FileProblem(f"{settings.table} has no row that can be used")
    buckets = make_buckets(data.buckets, fps_max=data.fps_max, multiple=multiple)
    count = min(settings.count, len(table))
    chosen = np.sort(np.random.default_rng(settings.seed).choice(len(table), size=count, replace=False)).tolist()
    cells, broken = list[tuple[str, torch.Tensor | None]](), list[str]()
    with (reporter or SilentReporter()).stage("draw", total=count, unit="samples") as progress:
        for index in chosen:
            caption = textwrap.wrap(escaped(table.texts[index]) or "(no caption)", _LETTERS, max_lines=2)
            name = escaped(table.file(index).name)[-_LETTERS:]
            strip_HWC = None
            try:
                strip_HWC = _strip(table, index)
            except MediaError as error:
                broken.append(error.message)
            cells.append(("\n".join([name, _label(table, index, buckets), *caption]), strip_HWC))
            progress.advance()
    picture = Image.fromarray(contact_sheet(cells).numpy())
    with atomic_path(sheet) as temporary:
        picture.save(temporary, format=_FORMATS[sheet.suffix.lower()])
    return PreviewResult(sheet=sheet, shown=count, rows=len(table), broken=tuple(broken))


def _strip(table: ClipTable, index: int) -> torch.Tensor:
    """Return the first, middle and last frame of a sample side by side. Raises MediaError if it cannot be read."""
    strip, last = Image.new("RGB", (3 * _FRAME[0], _FRAME[1]), BACKGROUND), int(table.samples.num_frames[index]) - 1
    for number, start in enumerate(dict.fromkeys((0, last // 2, last))):
        for frame_HWC in read_cut(table.file(index), start=start, num_frames=1):
            frame = Image.fromarray(frame_HWC.numpy())
            frame.thumbnail(_FRAME)
            strip.paste(frame, (number * _FRAME[0], 0))
    return torch.from_numpy(np.array(strip))


def _label(table: ClipTable, index: int, buckets: Buckets) -> str:
    """Return size, length, rate and bucket of a sample in one line."""
    samples = table.samples.only(np.array([index]))
    frames, fps = int(samples.num_frames[0]), float(samples.fps[0])
    size = f"{samples.width[0]}x{samples.height[0]}"
    length = "picture" if frames == 1 else f"{frames} frames" + ("" if np.isnan(fps) else f" at {fps:g}")
    reachable = [bucket for bucket in buckets.reachable(samples)[0].tolist() if bucket != NO_BUCKET]
    if not reachable:
        return f"{size}, {length}: no bucket"
    bucket = buckets[reachable[0]]
    shape = f"{bucket.aspect_ratio} ({bucket.width}x{bucket.height})"
    return f"{size}, {length}: {bucket.resolution} x {bucket.num_frames}, {shape}"
