"""Files with tables of samples: CSV or parquet, depending on the ending of the name."""

import csv
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from opensora_cli.core.exceptions import FileProblem, RequestError, missing_library
from opensora_cli.core.files import atomic_path
from opensora_cli.core.formatting import plain
from opensora_cli.core.reading import reading, require_file

CSV = ".csv"
PARQUET = ".parquet"

_FEW_ROWS = 1_000_000
"""Rows that a parquet file may hold in addition to one row per byte."""
_LITTLE_BYTES = 2**30
"""Bytes of cells that any parquet file may hold, and of the cells that are read at a time."""
_MOST_UNPACKED = 100
"""Bytes of cells that each byte of a parquet file may hold, in addition to `_LITTLE_BYTES`."""
_ROWS_OF_BATCH = 65_536


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
    unpacked = [group.column(index).total_uncompressed_size for group in groups for index in range(group.num_columns)]
    most = _LITTLE_BYTES + _MOST_UNPACKED * size
    if metadata.num_rows > _FEW_ROWS + size or sum(unpacked) > most:
        raise FileProblem(
            f"{path} claims {metadata.num_rows:,} rows and {sum(unpacked):,} bytes in a file of {size:,} bytes"
        )
    rows = min(_ROWS_OF_BATCH, _LITTLE_BYTES // max([1, *unpacked]) + 1)
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


_SAVE_AS_UTF_8 = "save it as CSV (UTF-8)"
_BROKEN = (OSError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError, csv.Error)
"""Exceptions for broken tables. pyarrow raises most of these, some for cells that Python cannot hold."""


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
