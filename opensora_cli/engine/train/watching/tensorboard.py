"""The lines of a run as curves in TensorBoard."""

from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.core.exceptions import HardwareError, OutputError
from opensora_cli.engine.train.watching.lines import Line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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
