"""`osora data scan` and `shard`: make tables of the pictures and videos of a folder, and split them."""

import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError, FileProblem, OsoraError, OutputError
from opensora_cli.core.files import require_writable
from opensora_cli.core.formatting import as_unicode, is_unicode, shown_path
from opensora_cli.core.locks import lock_beside, sole_run
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.reading import read_text, reading, require_there
from opensora_cli.data.table import (
    COLUMNS,
    BrokenFile,
    check_table_name,
    split_table,
    write_table,
)
from opensora_cli.media.containers import MediaFacts
from opensora_cli.media.read import media_files, probe
from opensora_cli.settings.data import ScanSettings, ShardSettings

_CAPTION_ENDINGS = (".txt", ".caption")
"""Endings of caption files, the first of which counts."""
_LONGEST_BYTES = 10**6
"""Limit of a caption file in bytes; no text encoder reads a hundredth of it."""


class ScanResult(Document):
    """Result of a scan."""

    SCHEMA = "osora.data-scan/4"

    table: Path
    rows: int
    videos: int
    pictures: int
    without_caption: int
    broken: tuple[BrokenFile, ...]

    def lines(self) -> list[str]:
        """Return the result for people."""
        return [
            f"table     {self.table}: {self.videos:,} videos, {self.pictures:,} pictures",
            *([f"caption   {self.without_caption:,} without one"] if self.without_caption else []),
            *(f"broken    {file.reason}" for file in self.broken),
        ]

    def raise_for_problems(self) -> None:
        """Raise BatchError if files could not be read."""
        if count := len(self.broken):
            raise BatchError(
                f"{count} {'file' if count == 1 else 'files'} cannot be read: {self.table} has the others",
                hint="fix or remove them, and scan again",
            )


def scan(settings: ScanSettings, *, reporter: Reporter | None = None) -> ScanResult:
    """Write the table of a folder, at the end of the scan. Files whose names begin with a dot are ignored.

    Raises FileProblem if the folder has neither pictures nor videos or cannot be read, and OutputError if the table
    exists and is not to be replaced, or another process writes it.
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
    files = media_files(folder)
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
    rows, broken = list[tuple[object, ...]](), list[BrokenFile]()
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
    write_table(table, COLUMNS, rows)
    pictures = sum(row[-1] is None for row in rows)
    return ScanResult(
        table=table,
        rows=len(rows),
        videos=len(rows) - pictures,
        pictures=pictures,
        without_caption=sum(not row[1] for row in rows),
        broken=tuple(broken),
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
    """Return the caption of a picture or video in one line; empty without one. Raises FileProblem if it is broken."""
    for ending in _CAPTION_ENDINGS:
        file = path.with_suffix(ending)
        if os.path.lexists(file):
            text = read_text(file, max_bytes=_LONGEST_BYTES)
            if "\0" in text:
                raise FileProblem(f"{file} has a zero byte in its text")
            return " ".join(text.split())
    return ""


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
