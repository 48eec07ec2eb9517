"""`osora data scan` and `shard`: turn a folder of pictures and videos into tables for training."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError, FileProblem, OsoraError, OutputError
from opensora_cli.core.files import require_there
from opensora_cli.core.folder_lock import lock_beside, sole_run
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.reading import read_text, reading
from opensora_cli.core.strict_json import is_unicode
from opensora_cli.data.table import COLUMNS
from opensora_cli.data.table_files import check_table_name, split_table, write_table
from opensora_cli.engine.data.journal import Finding, ScanJournal
from opensora_cli.media.read import media_files, probe
from opensora_cli.settings.data import ScanSettings, ShardSettings

_CAPTION_ENDINGS = (".txt", ".TXT", ".caption", ".json")
"""Endings of caption files, the first of which counts."""
_CAPTION_KEYS = ("text", "caption", "prompt")
_NAMED = 5
"""Most files, and endings, that a line names."""
_LONGEST_BYTES = 10**6
"""Limit of a caption file in bytes; no text encoder reads a hundredth of it."""


class BrokenFile(Document):
    """File that is not in the table."""

    path: str
    reason: str
    """Error message, which names the file or its caption file."""


class ScanResult(Document):
    """Result of a scan."""

    SCHEMA = "osora.data-scan/2"

    table: Path
    rows: int
    videos: int
    pictures: int
    without_caption: int
    read: int
    """Files that were read or tried; the other files had not changed since an earlier scan."""
    broken: tuple[BrokenFile, ...]
    other_files: dict[str, int]
    """Number of files that are neither pictures, videos nor their captions, by ending."""
    closed_folders: tuple[BrokenFile, ...] = ()
    """Folders that could not be listed."""
    uneven: tuple[Path, ...] = ()
    """Videos some of whose frames last much longer than others; training takes frames by their numbers."""

    def lines(self) -> list[str]:
        """Return the result for people."""
        known = self.rows + len(self.broken) - self.read
        return [
            f"table     {self.table}: {self.videos:,} videos, {self.pictures:,} pictures",
            f"files     {self.read:,} read, {known:,} known from before",
            *([f"caption   {self.without_caption:,} without one"] if self.without_caption else []),
            *(
                [f"uneven    {_names(self.uneven)}: the frame rate varies, training ignores that"]
                if self.uneven
                else []
            ),
            *([f"skipped   {_counts(self.other_files)}"] if self.other_files else []),
            *(f"broken    {file.reason}" for file in self.broken),
            *(f"closed    {folder.reason}" for folder in self.closed_folders),
        ]

    def raise_for_problems(self) -> None:
        """Raise BatchError if files or folders could not be read."""
        counts = [
            f"{len(found)} {what}" if len(found) != 1 else f"1 {what.removesuffix('s')}"
            for found, what in ((self.broken, "files"), (self.closed_folders, "folders"))
            if found
        ]
        if counts:
            raise BatchError(
                f"{' and '.join(counts)} cannot be read: {self.table} has the others",
                hint="fix or remove them, and scan again",
            )


def _names(paths: Sequence[Path]) -> str:
    """Return the first names, and the number of the others."""
    names = ", ".join(path.name for path in paths[:_NAMED])
    return f"{names} and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else names


def _counts(endings: Mapping[str, int]) -> str:
    """Return the most frequent endings with their numbers, and the number of the others."""
    frequent = Counter(endings).most_common(_NAMED)
    others = sum(endings.values()) - sum(number for _, number in frequent)
    shown = [f"{number:,} {ending or 'without an ending'}" for ending, number in frequent]
    return ", ".join([*shown, f"{others:,} others"] if others else shown)


def scan(settings: ScanSettings, *, reporter: Reporter | None = None) -> ScanResult:
    """Write the table of a folder.

    Findings are appended to a journal beside the table. After an interruption, or when files were added or changed, the
    next scan reads only the missing and changed files, and retries unreadable ones. A deep scan also reads files that
    were not decoded completely before. Captions are read every time. Files whose names begin with a dot are ignored.

    Raises:
        FileProblem: the folder is missing, or has neither pictures nor videos.
        OutputError: the table is not the unchanged result of a scan, cannot be written, or another process writes it.
        HardwareError: the table is parquet, and pyarrow is not installed.
        KeyboardInterrupt: its argument says how to continue.
    """
    folder = Path(settings.folder)
    table = Path(settings.table or f"{os.path.abspath(folder)}.csv")
    check_table_name(table)
    require_there(str(folder))
    problem, hint = f"another run writes {table}", "wait until it ends, or use another --out"
    with sole_run(lock_beside(table, table.name), problem=problem, hint=hint):
        return _scan(folder, table, settings, reporter=reporter or SilentReporter())


def _scan(folder: Path, table: Path, settings: ScanSettings, *, reporter: Reporter) -> ScanResult:
    journal = ScanJournal(table)
    if settings.overwrite:
        journal.discard()
    journal.read()
    if os.path.lexists(table) and not settings.overwrite and not journal.is_of_table():
        raise OutputError(
            f"{table} exists already, and is not as osora data scan left it",
            hint="keep what you changed under another name, and scan with --overwrite or another --out",
        )
    closed: list[BrokenFile] = []
    files, others = media_files(
        folder, unread=lambda place, reason: closed.append(BrokenFile(path=str(place), reason=reason))
    )
    found, read = _find(files, journal, settings, reporter=reporter)
    rows, broken = _rows(found)
    write_table(table, COLUMNS, rows, on_written=journal.expect)
    findings = [each for each in found if isinstance(each, Finding)]
    journal.finish(findings)
    own = {file.with_suffix(ending) for file in files for ending in _CAPTION_ENDINGS} | {table.absolute(), journal.path}
    pictures = sum(row[-1] is None for row in rows)
    return ScanResult(
        table=table,
        rows=len(rows),
        videos=len(rows) - pictures,
        pictures=pictures,
        without_caption=sum(not row[1] for row in rows),
        read=read,
        broken=tuple(broken),
        closed_folders=tuple(closed),
        uneven=tuple(Path(each.path) for each in findings if each.is_uneven),
        other_files=Counter(file.suffix.lower() for file in others if file not in own),
    )


def _find(
    files: list[Path], journal: ScanJournal, settings: ScanSettings, *, reporter: Reporter
) -> tuple[list[Finding | BrokenFile], int]:
    """Return the finding or error of each file, in order, and the number of files that had to be read."""
    found: dict[Path, Finding | BrokenFile] = {}
    unread: list[Path] = []
    for file in files:
        known = _known(file, journal)
        if known is None or (settings.deep and not known.deep):
            unread.append(file)
        else:
            found[file] = known
    count = settings.workers or os.cpu_count() or 1
    with (
        journal.appending() as lines,
        reporter.stage("read", total=len(unread), unit="files") as progress,
        ThreadPoolExecutor(count) as pool,
    ):
        futures = {pool.submit(_look_into, file, deep=settings.deep): file for file in unread}
        try:
            for done in as_completed(futures):
                each = found[futures[done]] = done.result()
                if isinstance(each, Finding):
                    lines.write(each.to_line())
                progress.advance()
        except KeyboardInterrupt as interrupt:
            pool.shutdown(cancel_futures=True)
            noted = sum(isinstance(each, Finding) for each in found.values())
            raise KeyboardInterrupt(
                f"{noted} of {len(files)} files are noted: the same command goes on from there"
            ) from interrupt
    return [found[file] for file in files], len(unread)


def _known(file: Path, journal: ScanJournal) -> Finding | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return journal.find(str(file), size=status.st_size, mtime_ns=status.st_mtime_ns)


def _look_into(file: Path, *, deep: bool) -> Finding | BrokenFile:
    try:
        with reading(file):
            # The time before reading: a file that changes during the scan is read again by the next scan.
            status = file.stat()
            facts = asdict(probe(file, deep=deep))
            return Finding(path=str(file), size=status.st_size, mtime_ns=status.st_mtime_ns, deep=deep, **facts)
    except OsoraError as error:
        return BrokenFile(path=str(file), reason=error.message)


def _rows(found: list[Finding | BrokenFile]) -> tuple[list[tuple[object, ...]], list[BrokenFile]]:
    rows: list[tuple[object, ...]] = []
    broken: list[BrokenFile] = []
    for each in found:
        if isinstance(each, BrokenFile):
            broken.append(each)
            continue
        try:
            caption = read_caption(Path(each.path))
        except FileProblem as error:
            broken.append(BrokenFile(path=each.path, reason=error.message))
            continue
        height, width = each.height, each.width
        fps = None if each.fps is None else round(each.fps, 6)
        shape = round(height / width, 6)
        rows.append((each.path, caption, each.num_frames, height, width, shape, height * width, fps))
    return rows, broken


def read_caption(path: Path) -> str:
    """Return the caption of a picture or video in one line, empty without one. Raises FileProblem if it is unreadable.

    A text file, `.txt` or `.caption`, takes precedence. A JSON file holds a text, or an object with `text`, `caption`
    or `prompt`.
    """
    for ending in _CAPTION_ENDINGS:
        file = path.with_suffix(ending)
        if (text := _content(file)) is not None:
            return " ".join((_from_json(text, file) if ending == ".json" else text).split())
    return ""


def _content(path: Path) -> str | None:
    if not os.path.lexists(path):
        return None
    return _as_text(read_text(path, max_bytes=_LONGEST_BYTES), path)


def _as_text(text: str, path: Path) -> str:
    """Return `text` if a table can hold it. JSON texts may have half characters and zero bytes, which are refused."""
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
    """Write the parts beside the table, so that relative paths stay valid: `clips_1-of-8.csv` and so on.

    Raises:
        FileProblem: the table is missing, broken, or has fewer rows than parts.
        OutputError: a part exists already, or cannot be written.
        HardwareError: the table is parquet, and pyarrow is not installed.
    """
    table = Path(settings.table)
    digits = len(str(settings.parts))
    targets = [
        table.with_name(f"{table.stem}_{part:0{digits}d}-of-{settings.parts}{table.suffix}")
        for part in range(1, settings.parts + 1)
    ]
    existing = [target for target in targets if os.path.lexists(target)]
    if existing and not settings.overwrite:
        raise OutputError(f"{existing[0]} exists already", hint="use --overwrite")
    rows = split_table(table, targets)
    return ShardResult(parts=tuple(TablePart(table=t, rows=n) for t, n in zip(targets, rows, strict=True)))
