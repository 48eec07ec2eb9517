"""The log of a run: one JSON object a line."""

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.train.watching.lines import Line

_MOST_WAITING = 10_000


class JsonLog:
    """Adds every line to a file as it comes.

    A line that cannot be written waits for the next, with up to ten thousand others: a disk that is full for a while
    does not end a run.

    Args:
        path: of the file.
        reporter: warned once whenever lines begin to wait.
    """

    def __init__(self, path: Path, *, reporter: Reporter) -> None:
        self._path = path
        self._reporter = reporter
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)
        self._whole: int | None = None
        """Bytes of the file before the first line that waits, where one does."""

    def begin(self, step: int) -> None:
        """Do nothing: `cut_back` has taken out what comes after."""

    def write(self, line: Line) -> None:
        """Add a line, after those that wait. Numbers that are not finite are null, since JSON has no others."""
        self._waiting.append(json.dumps(_finite(line), allow_nan=False) + "\n")
        error = self._write_waiting()
        if error and len(self._waiting) == 1:
            self._reporter.warn(f"cannot write {self._path}: {error}: its lines wait until that is possible")

    def close(self) -> None:
        """Write what waits; it is lost if that is still impossible."""
        error = self._write_waiting() if self._waiting else None
        if error:
            self._reporter.warn(f"cannot write {self._path}: {error}: it lacks the last {len(self._waiting)} lines")
            self._waiting.clear()

    def _write_waiting(self) -> str | None:
        """Return why it cannot be done; None: it is."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as log:
                end = log.tell()
                self._whole = end if self._whole is None else min(self._whole, end)
                # A full disk may have taken half of what is written again now.
                log.truncate(self._whole)
                log.write("".join(self._waiting).encode())
        except OSError as error:
            return error.strerror or str(error)
        self._waiting.clear()
        self._whole = None
        return None


def cut_back(path: Path, *, step: int) -> None:
    """Take out of a log what comes after a step.

    Raises:
        OutputError: it cannot be read or written.
    """
    if path.exists():
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise OutputError(f"cannot read {path}: {reason}", hint="move it out of the run's folder") from error
        kept = "".join(line for line in lines if _step_of(line) <= step)
        write_bytes_atomic(path, kept.encode())


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # half a line, from a crash


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
