"""The logs of a run: JSON lines, and curves in TensorBoard."""

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.core.exceptions import OutputError, missing_library
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.progress import Reporter
from opensora_cli.core.reading import require_file
from opensora_cli.core.regular_files import open_regular
from opensora_cli.engine.train.watching.lines import Line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_MOST_WAITING = 10_000
_MOVE_OUT = "move it out of the run's folder"


class JsonLog:
    """Adds every line to a file as it comes.

    Lines that cannot be written, as on a full disk, are kept for the next write, up to ten thousand. `reporter` is
    warned when the first line is kept back, and of lines that are lost.
    """

    def __init__(self, path: Path, *, reporter: Reporter) -> None:
        self._path = path
        self._reporter = reporter
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)
        self._whole: int | None = None
        """Size of the file before the first line that is kept back, if one is."""

    def start(self, step: int) -> None:
        """Do nothing: `cut_back` has removed later lines."""

    def write(self, line: Line) -> None:
        """Write a line, after those that were kept back. Numbers that are not finite become null."""
        self._waiting.append(json.dumps(_finite(line), allow_nan=False) + "\n")
        error = self._write_waiting()
        if error and len(self._waiting) == 1:
            self._reporter.warn(f"cannot write {self._path}: {error}: its lines are kept until that is possible")

    def close(self) -> None:
        """Write the lines that were kept back; they are lost if that still fails."""
        error = self._write_waiting() if self._waiting else None
        if error:
            self._reporter.warn(f"cannot write {self._path}: {error}: it lacks the last {len(self._waiting)} lines")
            self._waiting.clear()

    def _write_waiting(self) -> str | None:
        """Return why it cannot be done; None: it is."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", opener=open_regular) as log:
                end = log.tell()
                self._whole = end if self._whole is None else min(self._whole, end)
                # A full disk may hold half of the lines that are written again now.
                log.truncate(self._whole)
                log.write("".join(self._waiting).encode())
        except OSError as error:
            return error.strerror or str(error)
        self._waiting.clear()
        self._whole = None
        return None


def cut_back(path: Path, *, step: int) -> None:
    """Remove the lines after a step from a log. Raises FileProblem if it cannot be read or written."""
    if path.exists():
        require_file(path, hint=_MOVE_OUT)
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise OutputError(f"cannot read {path}: {reason}", hint=_MOVE_OUT) from error
        kept = "".join(line for line in lines if _step_of(line) <= step)
        write_bytes_atomic(path, kept.encode())


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")  # half a line, from a crash


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require_tensorboard() -> "type[SummaryWriter]":
    """Return TensorBoard's writer of events. Raises HardwareError if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing_library("watching.tensorboard=true needs TensorBoard", extra="train") from error
    return SummaryWriter


class TensorBoardLog:
    """Writes `train/loss` and the other figures of steps, `validation/loss`, `seconds/data` and the other parts, and
    `exchange_gb_per_s/ulysses`.
    Raises HardwareError if TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        require_tensorboard()
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def start(self, step: int) -> None:
        """Start a file of events, which makes earlier ones of later steps void.
        Raises OutputError if it cannot be written.
        """
        try:
            self._writer = require_tensorboard()(str(self._folder), purge_step=step + 1)
        except OSError as error:
            raise OutputError(f"cannot write {self._folder}: {error.strerror or error}") from error

    def write(self, line: Line) -> None:
        """Write the figures of a line of training or of a validation."""
        event, step = line.get("event", "train"), line["step"]
        if self._writer is None or event == "skipped":
            return
        for name, value in line.items():
            if isinstance(value, dict):
                for part, number in value.items():
                    self._writer.add_scalar(f"{name}/{part}", number, step)
            elif name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(f"{event}/{name}", value, step)
        # A run that is killed does not write this again when it is resumed.
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
