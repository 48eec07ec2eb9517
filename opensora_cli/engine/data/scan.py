"""`osora data scan`: from a folder of pictures and videos to the table that training reads."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.exceptions import BatchError, FileProblem, OsoraError, OutputError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.data.table import COLUMNS
from opensora_cli.data.table_files import check_table_name, write_table
from opensora_cli.engine.data.captions import read_caption
from opensora_cli.engine.data.scan_journal import Finding, ScanJournal
from opensora_cli.media.read import probe
from opensora_cli.settings.data_tools import ScanSettings

RESULT_SCHEMA = "osora.data-scan/1"

_VIDEOS = {".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".ogv", ".wmv", ".gif"}
_PICTURES = {".png", ".apng", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".tif", ".tiff", ".jp2", ".ppm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenFile:
    """A file that is not in the table."""

    path: str
    reason: str
    """Names it, or the file of its caption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """What a scan found."""

    table: Path
    videos: int
    pictures: int
    without_caption: int
    read: int
    """Files that were read or tried; the others had not changed since an earlier scan."""
    broken: tuple[BrokenFile, ...]

    def to_json(self) -> dict[str, object]:
        """Return the result as a document of the schema `osora.data-scan/1`."""
        return {
            "schema": RESULT_SCHEMA,
            "table": str(self.table),
            "rows": self.videos + self.pictures,
            "videos": self.videos,
            "pictures": self.pictures,
            "without_caption": self.without_caption,
            "read": self.read,
            "broken": [{"path": file.path, "reason": file.reason} for file in self.broken],
        }

    def lines(self) -> list[str]:
        """Return the result for people."""
        known = self.videos + self.pictures + len(self.broken) - self.read
        return [
            f"table     {self.table}: {self.videos:,} videos, {self.pictures:,} pictures",
            f"files     {self.read:,} read, {known:,} known from before",
            *([f"caption   {self.without_caption:,} without one"] if self.without_caption else []),
            *(f"broken    {file.reason}" for file in self.broken),
        ]

    def require_whole(self) -> None:
        """Raise BatchError if files could not be read."""
        if self.broken:
            count = "1 file" if len(self.broken) == 1 else f"{len(self.broken)} files"
            raise BatchError(
                f"{count} cannot be read: {self.table} has the others", hint="mend or remove them, and scan again"
            )


def scan(settings: ScanSettings, *, reporter: Reporter | None = None) -> ScanResult:
    """Write the table of a folder.

    What is found is noted in a journal beside the table as it comes: after an interruption, or when files were added or
    changed, the next scan reads those alone, and tries again what it could not read. Captions are read anew every time.
    Files whose names begin with a dot are left out.

    Args:
        settings: which folder, and where to.
        reporter: shown progress; None: nobody.

    Raises:
        FileProblem: the folder is missing, or has neither pictures nor videos.
        OutputError: the table exists and is not as a scan left it, or cannot be written.
        HardwareError: the table is parquet, and pyarrow is not installed.
        KeyboardInterrupt: its argument says how to go on.
    """
    folder = Path(settings.folder)
    table = Path(settings.table or f"{os.path.abspath(folder)}.csv")
    check_table_name(table)
    journal = ScanJournal(table)
    if settings.overwrite:
        journal.path.unlink(missing_ok=True)
    journal.read()
    if os.path.lexists(table) and not settings.overwrite and not journal.is_of_table():
        raise OutputError(
            f"{table} exists already, and is not as osora data scan left it",
            hint="keep what you changed under another name, and scan with --overwrite or another --out",
        )
    files = [*_media_files(folder)]
    if not files:
        raise FileProblem(f"{folder} has no pictures or videos", hint=f"it may hold {', '.join(sorted(_VIDEOS))} ...")
    found, read = _find(files, journal, workers=settings.workers, reporter=reporter or SilentReporter())
    rows, broken = _rows(found)
    write_table(table, COLUMNS, rows)
    journal.finish([each for each in found if isinstance(each, Finding)])
    pictures = sum(row[-1] is None for row in rows)
    return ScanResult(
        table=table,
        videos=len(rows) - pictures,
        pictures=pictures,
        without_caption=sum(not row[1] for row in rows),
        read=read,
        broken=tuple(broken),
    )


def _media_files(folder: Path) -> Iterator[Path]:
    """Yield the files to look into, in order."""
    if not folder.is_dir():
        raise FileProblem(f"{folder} is not a folder")
    for place, folders, names in os.walk(folder.absolute()):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in _VIDEOS | _PICTURES:
                yield Path(place, name)


def _find(
    files: list[Path], journal: ScanJournal, *, workers: int | None, reporter: Reporter
) -> tuple[list[Finding | BrokenFile], int]:
    """Return what is known of each file, in order, and how many had to be read."""
    found: dict[Path, Finding | BrokenFile] = {}
    unread: list[Path] = []
    for file in files:
        known = _known(file, journal)
        if known is None:
            unread.append(file)
        else:
            found[file] = known
    count = workers or os.cpu_count() or 1
    with (
        journal.appending() as lines,
        reporter.stage("read", total=len(unread), unit="files") as progress,
        ThreadPoolExecutor(count) as pool,
    ):
        futures = {pool.submit(_look_into, file): file for file in unread}
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


def _look_into(file: Path) -> Finding | BrokenFile:
    try:
        # Before it is read: what changes meanwhile is read again by the next scan.
        status = file.stat()
        return Finding(path=str(file), size=status.st_size, mtime_ns=status.st_mtime_ns, facts=probe(file))
    except OsoraError as error:
        reason = error.message
    except OSError as error:
        reason = f"{file} cannot be read: {error.strerror or error}"
    return BrokenFile(path=str(file), reason=reason)


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
        facts = each.facts
        height, width = facts.height, facts.width
        fps = None if facts.fps is None else round(facts.fps, 6)
        shape = round(height / width, 6)
        rows.append((each.path, caption, facts.num_frames, height, width, shape, height * width, fps))
    return rows, broken
