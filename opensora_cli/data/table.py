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
        encoded = [text.encode() for text in texts]
        self._bytes: NDArray[np.uint8] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        """Return one text, counted from 0."""
        if not 0 <= index < len(self._ends):
            raise IndexError(index)
        begin = int(self._ends[index - 1]) if index else 0
        return self._bytes[begin : int(self._ends[index])].tobytes().decode()

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
    texts = {name: [_text(cell) for cell in columns[name]] for name in ("path", "text")}
    empty = [None] * len(columns["path"])
    numbers = {
        name: np.array([_number(cell) for cell in columns.setdefault(name, empty)], dtype=np.float64)
        for name in (*_SIZES, "fps", "motion_score")
    }
    reasons = _reasons(columns, texts, numbers)
    kept = np.array([row for row in range(len(empty)) if row not in reasons], dtype=np.int64)
    sizes = {name: numbers[name][kept].astype(np.int64) for name in _SIZES}
    paths = texts["path"]
    return ClipTable(
        folder=path.absolute().parent,
        rows=kept + 1,
        paths=TextColumn(paths[row] or "" for row in kept),
        texts=TextColumn(texts["text"][row] or "" for row in kept),
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
