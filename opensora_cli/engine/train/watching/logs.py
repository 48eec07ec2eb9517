"""The logs of a run: JSON lines, and curves in TensorBoard."""

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.core.exceptions import HardwareError, OutputError
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.train.watching.lines import Line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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


def require_tensorboard() -> None:
    """Check that TensorBoard is installed.

    Raises:
        HardwareError: it is not.
    """
    _writer_class()


class TensorBoardLog:
    """Writes `train/loss` and the other figures of steps, `seconds/data` and the other parts, and `validation/loss`.

    Args:
        folder: of the events.

    Raises:
        HardwareError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        require_tensorboard()
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def begin(self, step: int) -> None:
        """Begin a file of events, which says that earlier ones of later steps are void.

        Raises:
            OutputError: it cannot be written.
        """
        try:
            self._writer = _writer_class()(str(self._folder), purge_step=step + 1)
        except OSError as error:
            raise OutputError(f"cannot write {self._folder}: {error.strerror or error}") from error

    def write(self, line: Line) -> None:
        """Write the figures of a line of training or of a validation."""
        event, step = line.get("event", "train"), line["step"]
        if self._writer is None or event == "skipped":
            return
        for name, value in line.items():
            if name == "seconds" and isinstance(value, dict):
                for part, seconds in value.items():
                    self._writer.add_scalar(f"seconds/{part}", seconds, step)
            elif name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(f"{event}/{name}", value, step)
        # A run that is killed later goes on after a checkpoint, and does not write this again.
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def _writer_class() -> "type[SummaryWriter]":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise HardwareError(
            "watching.tensorboard=true needs TensorBoard, which is not installed", hint="pip install 'osora[train]'"
        ) from error
    return SummaryWriter
