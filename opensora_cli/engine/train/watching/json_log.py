"""The log of a run: one JSON object a line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.engine.train.watching.lines import Line


class JsonLog:
    """Adds every line to a file as it comes.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, step: int) -> None:
        """Do nothing: `cut_back` has taken out what comes after."""

    def write(self, line: Line) -> None:
        """Add a line.

        Raises:
            OutputError: it cannot be written.
        """
        with _writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Do nothing: every line is on the disk."""


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


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
