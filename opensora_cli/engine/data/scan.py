"""`osora data scan`, `shard` and `preview`: make tables of the pictures and videos of a folder, split and show them."""

import json
import os
import textwrap
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError, FileProblem, MediaError, OsoraError, OutputError
from opensora_cli.core.files import atomic_path, require_writable
from opensora_cli.core.formatting import as_unicode, escaped, first_few, is_unicode, shown_path
from opensora_cli.core.locks import lock_beside, sole_run
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.reading import read_text, reading, require_there
from opensora_cli.data.buckets import Samples
from opensora_cli.data.table import (
    COLUMNS,
    BrokenFile,
    ClipTable,
    check_table_name,
    read_table,
    split_table,
    write_table,
)
from opensora_cli.media.containers import MediaFacts
from opensora_cli.media.read import media_files, probe, read_cut
from opensora_cli.media.write import BACKGROUND, contact_sheet
from opensora_cli.settings.tools import PreviewSettings, ScanSettings, ShardSettings

_FRAME = (160, 110)
_LETTERS = 76
"""Number of letters in a line."""
_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_CAPTION_ENDINGS = (".txt", ".TXT", ".caption", ".json")
"""Endings of caption files, the first of which counts."""
_CAPTION_KEYS = ("text", "caption", "prompt")
_LONGEST_BYTES = 10**6
"""Limit of a caption file in bytes; no text encoder reads a hundredth of it."""


class ScanResult(Document):
    """Result of a scan."""

    SCHEMA = "osora.data-scan/3"

    table: Path
    rows: int
    videos: int
    pictures: int
    without_caption: int
    broken: tuple[BrokenFile, ...]
    other_files: dict[str, int]
    """Number of files that are neither pictures, videos nor their captions, by ending."""
    closed_folders: tuple[BrokenFile, ...] = ()
    """Folders that could not be listed."""
    uneven: tuple[Path, ...] = ()
    """Videos some of whose frames last much longer than others; training takes frames by their numbers."""

    def lines(self) -> list[str]:
        """Return the result for people."""
        uneven = first_few([path.name for path in self.uneven])
        return [
            f"table     {self.table}: {self.videos:,} videos, {self.pictures:,} pictures",
            *([f"caption   {self.without_caption:,} without one"] if self.without_caption else []),
            *([f"uneven    {uneven}: the frame rate varies, training ignores that"] if uneven else []),
            *([f"skipped   {_counts(self.other_files)}"] if self.other_files else []),
            *(f"broken    {file.reason}" for file in self.broken),
            *(f"closed    {folder.reason}" for folder in self.closed_folders),
        ]

    def raise_for_problems(self) -> None:
        """Raise BatchError if files or folders could not be read."""
        if count := len(self.broken) + len(self.closed_folders):
            raise BatchError(
                f"{count} {'file or folder' if count == 1 else 'files or folders'} cannot be read: "
                f"{self.table} has the others",
                hint="fix or remove them, and scan again",
            )


def _counts(endings: Mapping[str, int]) -> str:
    """Return the most frequent endings with their numbers."""
    return first_few(
        [f"{number:,} {ending or 'without an ending'}" for ending, number in Counter(endings).most_common()]
    )


def scan(settings: ScanSettings, *, reporter: Reporter | None = None) -> ScanResult:
    """Write the table of a folder, at the end of the scan. Files whose names begin with a dot are ignored.

    Raises FileProblem if the folder has neither pictures nor videos, and OutputError if the table exists and is not to
    be replaced, or another process writes it.
    """
    folder = Path(settings.folder)
    table = Path(settings.table or f"{os.path.abspath(folder)}.csv")
    check_table_name(table)
    require_there(str(folder))
    problem, hint = f"another run writes {table}", "wait until it ends, or use another --out"
    with sole_run(lock_beside(table, table.name), problem=problem, hint=hint):
        if os.path.lexists(table) and not settings.overwrite:
            raise OutputError(
                f"{table} exists already",
                hint="scan with --overwrite, which also drops what you changed in it, or with another --out",
            )
        return _scan(folder, table, settings, reporter=reporter or SilentReporter())


def _scan(folder: Path, table: Path, settings: ScanSettings, *, reporter: Reporter) -> ScanResult:
    closed: list[BrokenFile] = []
    files, others = media_files(
        folder, unread=lambda place, reason: closed.append(BrokenFile(path=str(place), reason=reason))
    )
    found: dict[Path, tuple[MediaFacts, str] | BrokenFile] = {}
    with (
        reporter.stage("read", total=len(files), unit="files") as progress,
        ThreadPoolExecutor(settings.workers or os.cpu_count() or 1) as pool,
    ):
        futures = {pool.submit(_look_into, file): file for file in files}
        try:
            for done in as_completed(futures):
                found[futures[done]] = done.result()
                progress.advance()
        except KeyboardInterrupt as interrupt:
            pool.shutdown(cancel_futures=True)
            raise KeyboardInterrupt("no table is written: scan again") from interrupt
    rows, uneven, broken = list[tuple[object, ...]](), list[Path](), list[BrokenFile]()
    for file in files:
        each = found[file]
        if isinstance(each, BrokenFile):
            broken.append(each)
            continue
        facts, caption = each
        height, width = facts.height, facts.width
        fps = None if facts.fps is None else round(facts.fps, 6)
        rows.append(
            (str(file), caption, facts.num_frames, height, width, round(height / width, 6), height * width, fps)
        )
        if facts.is_uneven:
            uneven.append(file)
    write_table(table, COLUMNS, rows)
    own = {file.with_suffix(ending) for file in files for ending in _CAPTION_ENDINGS} | {table.absolute()}
    pictures = sum(row[-1] is None for row in rows)
    return ScanResult(
        table=table,
        rows=len(rows),
        videos=len(rows) - pictures,
        pictures=pictures,
        without_caption=sum(not row[1] for row in rows),
        broken=tuple(broken),
        closed_folders=tuple(closed),
        uneven=tuple(uneven),
        other_files=Counter(file.suffix.lower() for file in others if file not in own),
    )


def _look_into(file: Path) -> tuple[MediaFacts, str] | BrokenFile:
    if not is_unicode(str(file)):
        return BrokenFile(path=as_unicode(str(file)), reason=f"{shown_path(file)} is no name in UTF-8: rename it")
    try:
        with reading(file):
            return probe(file), read_caption(file)
    except OsoraError as error:
        return BrokenFile(path=str(file), reason=error.message)


def read_caption(path: Path) -> str:
    """Return the caption of a picture or video in one line, empty without one. Raises FileProblem if it is unreadable.

    A text file, `.txt` or `.caption`, takes precedence. A JSON file holds a text, or an object with `text`, `caption`
    or `prompt`.
    """
    for ending in _CAPTION_ENDINGS:
        file = path.with_suffix(ending)
        if os.path.lexists(file):
            text = _as_text(read_text(file, max_bytes=_LONGEST_BYTES), file)
            return " ".join((_from_json(text, file) if ending == ".json" else text).split())
    return ""


def _as_text(text: str, path: Path) -> str:
    """Return `text`. Raises FileProblem for zero bytes and half characters of JSON, which no table can hold."""
    if "\0" in text:
        raise FileProblem(f"{path} has a zero byte in its text")
    if not is_unicode(text):
        raise FileProblem(f"{path} has half a character in its text")
    return text


def _from_json(content: str, path: Path) -> str:
    try:
        with reading(path):
            value = json.loads(content)
    except ValueError as error:
        raise FileProblem(f"{path} is not JSON: {error}") from error
    found = value if isinstance(value, str) else None
    if isinstance(value, dict):
        found = next((value[key] for key in _CAPTION_KEYS if isinstance(value.get(key), str)), None)
    if found is None:
        raise FileProblem(f"{path} has no text under {', '.join(_CAPTION_KEYS[:-1])} or {_CAPTION_KEYS[-1]}")
    return _as_text(found, path)


class TablePart(Document):
    """Part of a table."""

    table: Path
    rows: int


class ShardResult(Document):
    """Written parts of a table, in order."""

    SCHEMA = "osora.data-shard/1"

    parts: tuple[TablePart, ...]

    def lines(self) -> list[str]:
        """Return the path of every part."""
        return [str(part.table) for part in self.parts]


def shard(settings: ShardSettings) -> ShardResult:
    """Write the parts beside the table, so that relative paths stay valid: `clips_1-of-8.csv` and so on."""
    table = Path(settings.table)
    digits = len(str(settings.parts))
    targets = [
        table.with_name(f"{table.stem}_{part:0{digits}d}-of-{settings.parts}{table.suffix}")
        for part in range(1, settings.parts + 1)
    ]
    for target in targets:
        require_writable(target, overwrite=settings.overwrite)
    rows = split_table(table, targets)
    return ShardResult(parts=tuple(TablePart(table=t, rows=n) for t, n in zip(targets, rows, strict=True)))


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


def preview(settings: PreviewSettings, *, reporter: Reporter | None = None) -> PreviewResult:
    """Make a contact sheet of some samples of a table: frames, name, size and caption."""
    sheet = Path(settings.sheet)
    require_writable(sheet, overwrite=settings.overwrite)
    table = read_table(Path(settings.table))
    if not len(table):
        raise FileProblem(f"{settings.table} has no row that can be used")
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
            cells.append(("\n".join([name, _label(table.samples, index), *caption]), strip_HWC))
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


def _label(samples: Samples, index: int) -> str:
    """Return size, length and rate of a sample in one line."""
    frames, fps = int(samples.num_frames[index]), float(samples.fps[index])
    length = "picture" if frames == 1 else f"{frames} frames" + ("" if np.isnan(fps) else f" at {fps:g}")
    return f"{samples.width[index]}x{samples.height[index]}, {length}"
