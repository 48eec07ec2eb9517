"""Files with tables of samples: CSV or parquet, depending on the ending of the name."""

import codecs
import csv
import importlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from opensora_cli.core.exceptions import FileProblem, OutputError, RequestError, missing_library
from opensora_cli.core.files import atomic_path
from opensora_cli.core.formatting import plain
from opensora_cli.core.reading import lack_of_machine, require_file

CSV = ".csv"
PARQUET = ".parquet"

_BROKEN: Mapping[str, tuple[type[Exception], ...]] = {
    CSV: (OSError, ValueError, csv.Error),
    PARQUET: (OSError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError),
}
"""Exceptions that broken files of each kind raise. pyarrow raises all of these, some for cells that Python cannot hold.
"""

_FEW_ROWS = 1_000_000
"""Rows that a parquet file may hold in addition to one row per byte."""
_LITTLE_BYTES = 2**30
_MOST_UNPACKED = 100
"""Bytes of cells that each byte of a parquet file may hold, in addition to `_LITTLE_BYTES`."""

_ROWS_OF_BATCH = 65_536
_LONG = frozenset({"BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"})
_UNCOUNTED = frozenset({"DELTA_BYTE_ARRAY"})
"""Encodings that store shared prefixes of texts once, and copy them on reading."""

_LOOKED_AT = 4096
"""Bytes at the beginning of a table that are searched for text with two bytes per character."""


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
    kind = check_table_name(path)
    with _reading(path):
        header = next(_rows_of(path, kind))
        if missing := [name for name in wanted if name not in header]:
            raise FileProblem(
                f"{path} has no column {' and no '.join(missing)}; it has {plain(', '.join(header)) or 'none'}",
                hint="osora data scan FOLDER makes a table that has them all",
            )
        names = [*wanted, *(name for name in optional if name in header)]
        rows = _rows_of(path, kind, names)
        header = next(rows)
        places = {name: header.index(name) for name in names}
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for row in rows:
            for name, place in places.items():
                cell = row[place] if place < len(row) else None
                if kind == CSV and cell and not cell.isascii() and _is_of_other_text(path, name, cell):
                    raise _no_utf8(path)
                columns[name].append(cell)
    return columns


def read_rows(path: Path) -> tuple[list[str], Iterator[list[Any]]]:
    """Return the names of all columns, and the rows; those of a CSV file may have different numbers of cells."""
    kind = check_table_name(path)

    def rows() -> Iterator[list[Any]]:
        with _reading(path):
            yield from _rows_of(path, kind)

    found = rows()
    return [str(name) for name in next(found)], found


def _rows_of(path: Path, kind: str, columns: Sequence[str] | None = None) -> Iterator[list[Any]]:
    """Yield the header, then the rows: those of a CSV file whole, those of a parquet file with the `columns` alone."""
    if kind == PARQUET:
        _parquet_rows(path)
        yield list(columns or _pyarrow().parquet.read_schema(path).names)
        for batch in _parquet_batches(path, columns):
            found = [batch.column(name) for name in columns] if columns else batch.columns
            yield from map(list, zip(*(column.to_pylist() for column in found), strict=True))
        return
    rows = _csv_rows(path)
    header = next(rows, None)
    if header is None:
        raise FileProblem(f"{path} is empty")
    yield header
    yield from rows


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table, whole or not at all. None becomes an empty cell."""
    kind = check_table_name(path)
    with atomic_path(path) as temporary:
        if kind == CSV:
            with temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(columns)
                writer.writerows(rows)
        else:
            cells = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in columns]
            pyarrow = _pyarrow()
            try:
                content = pyarrow.table(dict(zip(columns, cells, strict=True)))
            except UnicodeEncodeError as error:
                raise OutputError(
                    f"cannot write {path}: parquet holds only UTF-8, which {plain(str(error.object))} is not",
                    hint=f"rename the file, or write a {CSV} table",
                ) from error
            pyarrow.parquet.write_table(content, temporary)


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


def _is_of_other_text(path: Path, column: str, cell: str) -> bool:
    """Return whether a cell shows that the table is not in UTF-8. Names of existing files may have any bytes."""
    try:
        cell.encode()
    except UnicodeEncodeError:
        as_latin = cell.encode("utf-8", "surrogateescape").decode("latin-1")
        return column != "path" or (not os.path.exists(path.parent / cell) and os.path.exists(path.parent / as_latin))
    return False


def _no_utf8(path: Path) -> FileProblem:
    return FileProblem(f"{path} is not text in UTF-8", hint="save it as CSV (UTF-8)")


def _csv_rows(path: Path) -> Iterator[list[str]]:
    """Yield the rows that are not blank. The byte order mark of spreadsheets is dropped."""
    # Captions may be longer than the module's default limit; Windows does not accept the largest Python integer.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with (
        path.open("rb") as bytes_,
        io.TextIOWrapper(bytes_, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        head = bytes_.peek(_LOOKED_AT)
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head:
            raise _no_utf8(path)
        yield from (row for row in csv.reader(file) if row)


def _parquet_batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield the rows in batches. Raises FileProblem if the texts take far more memory than any table of this size.

    Parquet stores repeated texts once. They are counted before they are copied into each row.
    """
    num_rows, size, pyarrow = _parquet_rows(path), path.stat().st_size, _pyarrow()
    metadata = pyarrow.parquet.read_metadata(path)
    read = [index for index in range(metadata.num_columns) if _is_in(metadata.schema.column(index).path, columns)]
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = [group.column(index) for group in groups for index in read]
    longest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
    texts = {leaf.path for leaf in map(metadata.schema.column, read) if _is_text(leaf)}
    texts -= {chunk.path_in_schema for chunk in chunks if _UNCOUNTED & {*chunk.encodings}}
    is_counted = all(chunk.path_in_schema in texts for chunk in chunks if chunk.physical_type in _LONG)
    rows = _ROWS_OF_BATCH if is_counted else min(_LITTLE_BYTES // max(longest, 1) + 1, _ROWS_OF_BATCH)
    left = _LITTLE_BYTES + _MOST_UNPACKED * size
    with pyarrow.parquet.ParquetFile(path, read_dictionary=sorted(texts)) as file:
        for batch in file.iter_batches(batch_size=rows, columns=columns):
            left -= sum(map(_bytes_of_cells, batch.columns))
            if left < 0:
                raise FileProblem(f"{path} has far more text in {num_rows:,} rows than its {size:,} bytes can hold")
            cells = [column.dictionary_decode() if _is_shared(column) else column for column in batch.columns]
            fields = [field.with_type(column.type) for field, column in zip(batch.schema, cells, strict=True)]
            schema = pyarrow.schema(fields, metadata=batch.schema.metadata)
            yield pyarrow.RecordBatch.from_arrays(cells, schema=schema)


def _is_in(path: str, columns: Sequence[str] | None) -> bool:
    return columns is None or any(path == name or path.startswith(f"{name}.") for name in columns)


def _is_text(leaf: Any) -> bool:
    """Return whether a column holds texts, and not lists of texts."""
    return (
        leaf.physical_type == "BYTE_ARRAY"
        and leaf.logical_type.type in ("STRING", "NONE")
        and not leaf.max_repetition_level
    )


def _is_shared(cells: Any) -> bool:
    return bool(_pyarrow().types.is_dictionary(cells.type))


def _bytes_of_cells(cells: Any) -> int:
    """Return the bytes of a column, with each copy of a repeated text."""
    if not _is_shared(cells):
        return int(cells.nbytes)
    compute = importlib.import_module("pyarrow.compute")
    lengths = compute.binary_length(cells.dictionary).take(cells.indices)
    return int(cells.indices.nbytes + (compute.sum(lengths).as_py() or 0))


def _parquet_rows(path: Path) -> int:
    """Return the number of rows. Raises FileProblem if columns take far more memory than any table of this size."""
    metadata, size = _pyarrow().parquet.read_metadata(path), path.stat().st_size
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    unpacked = sum(
        group.column(index).total_uncompressed_size for group in groups for index in range(group.num_columns)
    )
    if metadata.num_rows > _FEW_ROWS + size or unpacked > _LITTLE_BYTES + _MOST_UNPACKED * size:
        raise FileProblem(
            f"{path} claims {metadata.num_rows:,} rows and {unpacked:,} bytes in a file of {size:,} bytes"
        )
    return int(metadata.num_rows)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    require_file(path, hint="osora data scan FOLDER makes one")
    try:
        yield
    except _BROKEN[path.suffix.lower()] as error:
        if lack := lack_of_machine(error, path):
            raise lack from error
        if isinstance(error, OSError) and error.strerror:
            raise FileProblem(f"{path} cannot be read: {error.strerror}") from error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileProblem(f"{path} is not a table: {plain(reason)}") from error


def _pyarrow() -> Any:
    """Return the untyped package pyarrow, with its parquet module loaded."""
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise missing_library("a parquet table needs pyarrow", extra="train") from error
    return importlib.import_module("pyarrow")
