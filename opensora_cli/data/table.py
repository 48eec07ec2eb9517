"""Table of samples for training: columns as arrays, and the invalid rows."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opensora_cli.core.documents import Document
from opensora_cli.data.buckets import Samples
from opensora_cli.data.table_files import read_columns

COLUMNS = ("path", "text", "num_frames", "height", "width", "aspect_ratio", "resolution", "fps")
"""Columns that `osora data scan` writes. `aspect_ratio` is height / width, `resolution` height x width."""

_SIZES = ("num_frames", "height", "width")


class TextColumn:
    """Immutable sequence of texts in one array of bytes.

    The reference counts of a million strings would make every worker copy the memory that it shares with its parent.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        # Lone surrogates come from file names that are not UTF-8.
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        self._bytes: NDArray[np.uint8] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        """Return one text, counted from 0."""
        if not 0 <= index < len(self._ends):
            raise IndexError(index)
        begin = int(self._ends[index - 1]) if index else 0
        return self._bytes[begin : int(self._ends[index])].tobytes().decode("utf-8", "surrogateescape")

    @property
    def num_empty(self) -> int:
        """Number of empty texts."""
        return int((np.diff(self._ends, prepend=0) == 0).sum())

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return all bytes, and the position of the end of each text."""
        return self._bytes, self._ends


class BadRow(Document):
    """Row that cannot be used."""

    row: int
    """Number of the row from 1, without the header."""
    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipTable:
    """Usable rows of a table, in order."""

    folder: Path
    """Folder of the table, where relative paths start."""
    rows: NDArray[np.int64]
    """Numbers of the rows in the table, from 1."""
    paths: TextColumn
    texts: TextColumn
    samples: Samples
    motion_scores: NDArray[np.float64]
    """Motion score of each row; NaN without one."""
    bad_rows: tuple[BadRow, ...]

    def __len__(self) -> int:
        """Return the number of usable rows."""
        return len(self.paths)

    def file(self, index: int) -> Path:
        """Return the file of a row."""
        return self.folder / self.paths[index]

    def motion_score(self, index: int) -> float | None:
        """Return the motion score of a row, if it has one."""
        score = float(self.motion_scores[index])
        return None if math.isnan(score) else score

    def only(self, wanted: NDArray[np.int64]) -> "ClipTable":
        """Return the table with only the rows with these indices."""
        return replace(
            self,
            rows=self.rows[wanted],
            paths=TextColumn(self.paths[index] for index in wanted.tolist()),
            texts=TextColumn(self.texts[index] for index in wanted.tolist()),
            samples=self.samples.only(wanted),
            motion_scores=self.motion_scores[wanted],
        )

    def fingerprint(self) -> str:
        """Hash of everything that the order of training depends on."""
        digest = hashlib.sha256()
        samples = self.samples
        for array in (*self.paths.arrays(), samples.num_frames, samples.height, samples.width, samples.fps):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def read_table(path: Path) -> ClipTable:
    """Read a table with the columns path, text, num_frames, height and width, and optionally fps and motion_score.

    Rows without a path, with a path or caption that is not text, or with sizes that are not positive integers, become
    `bad_rows`. Empty cells and NaN mean unknown frame rates and motion scores, and empty captions. Raises FileProblem
    if the table is missing or broken, or lacks a column.
    """
    columns = read_columns(path, ["path", "text", *_SIZES], optional=["fps", "motion_score"])
    paths, texts = ([_text(cell) for cell in columns[name]] for name in ("path", "text"))
    numbers = {name: _numbers(columns.get(name), rows=len(paths)) for name in (*_SIZES, "fps", "motion_score")}
    bad_rows = _bad_rows(paths, texts, columns, numbers)
    good = np.ones(len(paths), dtype=bool)
    good[[bad.row - 1 for bad in bad_rows]] = False
    kept = np.flatnonzero(good)
    return ClipTable(
        folder=path.absolute().parent,
        rows=kept + 1,
        paths=TextColumn(paths[row] or "" for row in kept),
        texts=TextColumn(texts[row] or "" for row in kept),
        samples=Samples(
            num_frames=numbers["num_frames"][kept].astype(np.int64),
            height=numbers["height"][kept].astype(np.int64),
            width=numbers["width"][kept].astype(np.int64),
            fps=numbers["fps"][kept],
        ),
        motion_scores=numbers["motion_score"][kept],
        bad_rows=tuple(bad_rows),
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


def _numbers(cells: list[Any] | None, *, rows: int) -> NDArray[np.float64]:
    """Return cells as numbers: NaN for empty cells, infinity for cells without a number."""
    return np.full(rows, np.nan) if cells is None else np.array([_number(cell) for cell in cells], dtype=np.float64)


def _number(cell: Any) -> float:
    if cell is None or cell == "":
        return math.nan
    try:
        return float(cell)
    except (TypeError, ValueError):
        return math.inf


def _bad_rows(
    paths: list[str | None],
    texts: list[str | None],
    columns: dict[str, list[Any]],
    numbers: dict[str, NDArray[np.float64]],
) -> list[BadRow]:
    reasons: dict[int, str] = {}
    for name, cells in (("path", paths), ("text", texts)):
        for row, cell in enumerate(cells):
            if cell is None:
                reasons.setdefault(row, f"{name} holds {type(columns[name][row]).__name__}, and not a text in UTF-8")
            elif name == "path" and not cell.strip():
                reasons[row] = "path is empty"
    for name in _SIZES:
        values = numbers[name]
        with np.errstate(invalid="ignore"):
            wrong = ~((values >= 1) & (values < 2**31) & (values == np.floor(values)))
        for row in np.flatnonzero(wrong).tolist():
            reasons.setdefault(row, f"{name}={columns[name][row]} must be a whole number over 0")
    for name, lowest, allowed in (("fps", np.nextafter(0, 1), "over 0"), ("motion_score", 0.0, "of at least 0")):
        values = numbers[name]
        for row in np.flatnonzero(np.isinf(values) | (values < lowest)).tolist():
            reasons.setdefault(row, f"{name}={columns[name][row]} must be a number {allowed}")
    return [BadRow(row=row + 1, path=paths[row] or "", reason=reason) for row, reason in sorted(reasons.items())]
