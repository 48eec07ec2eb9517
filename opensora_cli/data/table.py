"""Tables of samples: CSV or parquet files by the ending of their names, and their columns as arrays for training."""

import csv
import hashlib
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import FileProblem, RequestError, missing_library
from opensora_cli.core.files import atomic_path
from opensora_cli.core.formatting import plain
from opensora_cli.core.reading import reading, require_file
from opensora_cli.data.buckets import Samples

COLUMNS = ("path", "text", "num_frames", "height", "width", "aspect_ratio", "resolution", "fps")
"""Columns that `osora data scan` writes. `aspect_ratio` is height / width, `resolution` height x width."""

_SIZES = ("num_frames", "height", "width")

CSV = ".csv"
PARQUET = ".parquet"

_FEW_ROWS = 1_000_000
"""Rows that a parquet file may hold in addition to one row per byte."""
_LITTLE_BYTES = 2**30
"""Bytes of cells that any parquet file may hold, and of the cells that are read at a time."""
_MOST_UNPACKED = 100
"""Bytes of cells that each byte of a parquet file may hold, in addition to `_LITTLE_BYTES`."""
_ROWS_OF_BATCH = 65_536
_SAVE_AS_UTF_8 = "save it as CSV (UTF-8)"
_BROKEN = (OSError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError, csv.Error)
"""Exceptions for broken tables. pyarrow raises most of these, some for cells that Python cannot hold."""


def check_table_name(path: Path) -> str:
    """Return `.csv` or `.parquet`. Raises RequestError for other names, HardwareError for parquet without pyarrow."""
    kind = path.suffix.lower()
    if kind not in (CSV, PARQUET):
        raise RequestError(f"{path} must end in {CSV} or {PARQUET}, which determines the format")
    if kind == PARQUET:
        _pyarrow()
    return kind


def read_columns(path: Path, wanted: Sequence[str], *, optional: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return columns of a table by name. Cells are texts, or values of any parquet type, and None if they are empty.

    A row of a CSV file with too few cells has None in the others. Raises FileProblem if the table is missing or broken,
    or lacks a column that is not `optional`.
    """
    header, _ = read_rows(path)
    if missing := [name for name in wanted if name not in header]:
        raise FileProblem(
            f"{path} has no column {' and no '.join(missing)}; it has {plain(', '.join(header)) or 'none'}",
            hint="osora data scan FOLDER makes a table that has them all",
        )
    names = [*wanted, *(name for name in optional if name in header)]
    header, rows = read_rows(path, names)
    columns: dict[str, list[Any]] = {name: [] for name in names}
    places = [(columns[name], header.index(name)) for name in names]
    for row in rows:
        for cells, place in places:
            cells.append(row[place] if place < len(row) else None)
    return columns


def read_rows(path: Path, columns: Sequence[str] | None = None) -> tuple[list[str], Iterator[list[Any]]]:
    """Return the names of all columns, and the rows; those of a CSV file may have different numbers of cells.

    `columns` are the only ones to read from a parquet file.
    """
    make = _parquet_rows if check_table_name(path) == PARQUET else _csv_rows

    def found() -> Iterator[list[Any]]:
        with _reading(path):
            yield from make(path, columns)

    rows = found()
    return [str(name) for name in next(rows)], rows


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table, whole or not at all. None becomes an empty cell."""
    kind = check_table_name(path)
    with atomic_path(path) as temporary:
        if kind == CSV:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(columns)
                writer.writerows(rows)
        else:
            cells = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in columns]
            pyarrow = _pyarrow()
            pyarrow.parquet.write_table(pyarrow.table(dict(zip(columns, cells, strict=True))), temporary)


def split_table(path: Path, targets: Sequence[Path]) -> list[int]:
    """Split a table into parts, one file each, with all columns and rows in order. Return the number of rows of each.

    Sizes differ by at most one row. Raises FileProblem if there are fewer rows than parts.
    """
    num_rows = sum(1 for _ in read_rows(path)[1])
    if num_rows < len(targets):
        raise FileProblem(f"{path} has {num_rows} rows, too few for {len(targets)} parts")
    ends = [num_rows * (part + 1) // len(targets) for part in range(len(targets))]
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    header, rows = read_rows(path)
    for target, size in zip(targets, sizes, strict=True):
        write_table(target, header, islice(rows, size))
    return sizes


def _csv_rows(path: Path, columns: Sequence[str] | None) -> Iterator[list[Any]]:
    """Yield the header and the rows that are not blank. The byte order mark of spreadsheets is dropped."""
    # Captions may be longer than the module's default limit; Windows does not accept the largest Python integer.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = filter(None, csv.reader(file))
        header = next(rows, None)
        if header is None:
            raise FileProblem(f"{path} is empty")
        if any("\0" in name for name in header):
            raise FileProblem(f"{path} is not text in UTF-8", hint=_SAVE_AS_UTF_8)
        yield header
        yield from rows


def _parquet_rows(path: Path, columns: Sequence[str] | None) -> Iterator[list[Any]]:
    """Yield the header and the rows. Raises FileProblem if the cells take far more memory than any table of this size.

    Parquet stores repeated texts once, so that a small file may hold terabytes. No cell is longer than its column.
    """
    parquet, size = _pyarrow().parquet, path.stat().st_size
    metadata = parquet.read_metadata(path)
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
    unpacked, most = sum(chunk.total_uncompressed_size for chunk in chunks), _LITTLE_BYTES + _MOST_UNPACKED * size
    if metadata.num_rows > _FEW_ROWS + size or unpacked > most:
        raise FileProblem(
            f"{path} claims {metadata.num_rows:,} rows and {unpacked:,} bytes in a file of {size:,} bytes"
        )
    read = [chunk for chunk in chunks if not columns or chunk.path_in_schema.partition(".")[0] in columns]
    longest = max((chunk.total_uncompressed_size for chunk in read), default=0)
    rows = min(_ROWS_OF_BATCH, _LITTLE_BYTES // max(longest, 1) + 1)
    with parquet.ParquetFile(path) as file:
        yield list(columns or file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=rows, columns=columns):
            most -= batch.nbytes
            if most < 0:
                raise FileProblem(
                    f"{path} has far more text in {metadata.num_rows:,} rows than its {size:,} bytes can hold"
                )
            cells = [batch.column(name) for name in columns] if columns else batch.columns
            yield from map(list, zip(*(column.to_pylist() for column in cells), strict=True))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    require_file(path, hint="osora data scan FOLDER makes one")
    with reading(path, hint=_SAVE_AS_UTF_8 if path.suffix.lower() == CSV else None):
        try:
            yield
        except _BROKEN as error:
            if isinstance(error, UnicodeError) or getattr(error, "strerror", None):
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise FileProblem(f"{path} is not a table: {plain(reason)}") from error


def _pyarrow() -> Any:
    """Return the untyped package pyarrow, with its parquet module loaded."""
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise missing_library("a parquet table needs pyarrow", extra="train") from error
    return importlib.import_module("pyarrow")


def text_column(texts: Iterable[str]) -> NDArray[Any]:
    """Return texts as an array without Python objects: their reference counts would make every worker copy them."""
    return np.array(list(texts), dtype=np.dtypes.StringDType())


class BadRow(Document):
    """Row that cannot be used."""

    row: int
    """Number of the row from 1, without the header."""
    path: str
    reason: str


class BrokenFile(Document):
    """File that cannot be read."""

    path: str
    reason: str
    """Error message, which names the file or its caption file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipTable:
    """Usable rows of a table, in order."""

    folder: Path
    """Folder of the table, where relative paths start."""
    paths: NDArray[Any]
    texts: NDArray[Any]
    samples: Samples
    motion_scores: NDArray[np.float64]
    """Motion score of each row; NaN without one."""
    bad_rows: tuple[BadRow, ...]

    def __len__(self) -> int:
        """Return the number of usable rows."""
        return len(self.paths)

    def file(self, index: int) -> Path:
        """Return the file of a row."""
        return self.folder / str(self.paths[index])

    def motion_score(self, index: int) -> float | None:
        """Return the motion score of a row, if it has one."""
        score = float(self.motion_scores[index])
        return None if math.isnan(score) else score

    def fingerprint(self) -> str:
        """Hash of everything that the order of training depends on."""
        digest = hashlib.sha256()
        samples, paths = self.samples, [path.encode() for path in self.paths.tolist()]
        digest.update(b"".join(paths))
        ends = np.cumsum([len(path) for path in paths], dtype=np.int64)
        for array in (ends, samples.num_frames, samples.height, samples.width, samples.fps):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def read_table(path: Path, *, look: Callable[[Sequence[Path]], Iterable[bool]] | None = None) -> ClipTable:
    """Read a table with the columns path, text, num_frames, height and width, and optionally fps and motion_score.

    Rows without a path, with a path or caption that is not text, or with sizes that are not positive integers, become
    `bad_rows`, and with `look`, which returns whether each file exists, also rows without a file. Empty cells and NaN
    mean unknown frame rates and motion scores, and empty captions. Raises FileProblem if the table is missing or
    broken, or lacks a column.
    """
    columns = read_columns(path, ["path", "text", *_SIZES], optional=["fps", "motion_score"])
    texts = {name: [_text(cell) for cell in columns[name]] for name in ("path", "text")}
    empty = [None] * len(columns["path"])
    numbers = {
        name: np.array([_number(cell) for cell in columns.setdefault(name, empty)], dtype=np.float64)
        for name in (*_SIZES, "fps", "motion_score")
    }
    reasons = _reasons(columns, texts, numbers)
    folder, paths = path.absolute().parent, texts["path"]
    if look is not None:
        good = [row for row in range(len(empty)) if row not in reasons]
        found = look([folder / str(paths[row]) for row in good])
        reasons |= {row: "there is no such file" for row, is_there in zip(good, found, strict=True) if not is_there}
    kept = np.array([row for row in range(len(empty)) if row not in reasons], dtype=np.int64)
    sizes = {name: numbers[name][kept].astype(np.int64) for name in _SIZES}
    return ClipTable(
        folder=folder,
        paths=text_column(paths[row] or "" for row in kept),
        texts=text_column(texts["text"][row] or "" for row in kept),
        samples=Samples(**sizes, fps=numbers["fps"][kept]),
        motion_scores=numbers["motion_score"][kept],
        bad_rows=tuple(BadRow(row=row + 1, path=paths[row] or "", reason=reasons[row]) for row in sorted(reasons)),
    )


def _text(cell: Any) -> str | None:
    """Return a cell as text; None if it holds something else, such as the lists and structs of parquet."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if isinstance(cell, bytes):
        try:
            return cell.decode("utf-8")
        except UnicodeDecodeError:
            return None
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return str(cell)
    return cell if isinstance(cell, str) else None


def _number(cell: Any) -> float:
    """Return a cell as a number: NaN for an empty cell, infinity for a cell without a number."""
    if cell is None or cell == "":
        return math.nan
    try:
        return float(cell)
    except (TypeError, ValueError):
        return math.inf


def _reasons(
    columns: dict[str, list[Any]], texts: dict[str, list[str | None]], numbers: dict[str, NDArray[np.float64]]
) -> dict[int, str]:
    """Return the reason for each row that cannot be used."""
    reasons: dict[int, str] = {}
    for name, cells in texts.items():
        for row, cell in enumerate(cells):
            if cell is None:
                reasons.setdefault(row, f"{name} holds {type(columns[name][row]).__name__}, and not a text in UTF-8")
            elif name == "path" and not cell.strip():
                reasons[row] = "path is empty"
    rules = {"fps": (np.nextafter(0, 1), "a number over 0"), "motion_score": (0.0, "a number of at least 0")}
    for name, values in numbers.items():
        with np.errstate(invalid="ignore"):
            if name in _SIZES:
                allowed, wrong = "a whole number over 0", ~((values >= 1) & (values < 2**31) & (values % 1 == 0))
            else:
                lowest, allowed = rules[name]
                wrong = np.isinf(values) | (values < lowest)
        for row in np.flatnonzero(wrong).tolist():
            reasons.setdefault(row, f"{name}={columns[name][row]} must be {allowed}")
    return reasons
