"""Metrics of a run: console lines, `log.jsonl`, TensorBoard, and MFU."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from torch.profiler import record_function

from opensora_cli.core.device import is_gpu, peak_memory_gib, profiler_range
from opensora_cli.core.exceptions import HardwareError, OutputError, missing_library
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.formatting import first_few
from opensora_cli.core.locks import open_regular
from opensora_cli.core.progress import Reporter
from opensora_cli.core.reading import read_bytes
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.early import LOG_FILE, MAX_LOG_BYTES, SAMPLES_FOLDER, TENSORBOARD_FOLDER
from opensora_cli.engine.train.predicted import open_mfu
from opensora_cli.engine.train.trainer import Clock, StepReport
from opensora_cli.settings.train import TrainSettings

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_BESIDE_TRAINING = ("checkpoint", "validation", "samples")


class Metrics:
    """Writer of a line with means over every few steps, and of a line for each validation and each skipped step.

    Lines go to `log.jsonl` and, if TensorBoard is on, to events such as `train/loss`, `validation/loss` and
    `seconds/data`. The terminal shows a short form of each line. Only the main rank writes and reports. Raises
    HardwareError if TensorBoard or a required GPU is missing.
    """

    def __init__(
        self, settings: TrainSettings, *, distribution: Distribution, output: Path, reporter: Reporter
    ) -> None:
        watching = settings.watching
        if watching.nvtx and not is_gpu(distribution.device):
            raise HardwareError("watching.nvtx=true needs a GPU, and this runs on a CPU", hint="drop it")
        # A program's own torch.profiler shows the parts of steps, too.
        self.clock = Clock(mark=profiler_range if watching.nvtx else record_function)
        self._output, self._reporter, self._device = output, reporter, distribution.device
        self._writes, self._every = distribution.is_main, settings.loop.log_every
        self._mfu = open_mfu(settings, distribution)
        self._log, self._unwritten, self._has_warned = output / LOG_FILE, b"", False
        self._open_events = require_tensorboard() if watching.tensorboard and self._writes else None
        self._events: SummaryWriter | None = None
        self._window: list[StepReport] = []
        """Steps of the unfinished line."""

    def start(self, step: int) -> None:
        """Continue after `step`, and count time from now on. Raises OutputError if events cannot be written."""
        self.clock.take()
        if self._open_events is not None:
            folder = self._output / TENSORBOARD_FOLDER
            try:
                # `purge_step` discards events of later steps.
                self._events = self._open_events(str(folder), purge_step=step + 1)
            except OSError as error:
                raise OutputError(f"cannot write {folder}: {error.strerror or error}") from error

    def on_step(self, report: StepReport) -> None:
        """Add a step, and write a line every few steps."""
        if not self._writes:
            return
        self._window.append(report)
        if report.skipped:
            self._write({"step": report.step, "event": "skipped", "samples": list(report.paths)})
            samples = f": {first_few(report.paths)}" if report.paths else ""
            self._reporter.warn(f"step {report.step}: loss or gradient is not finite, the step is skipped{samples}")
        if report.step % self._every == 0:
            line = self._line()
            self._write(line)
            for row in _CONSOLE:
                shown = [text.format(line[name]) for name, text in row if line.get(name) is not None]
                self._reporter.note("  ".join(shown))
            self._window = []

    def on_validation(self, step: int, figures: Mapping[str, float]) -> None:
        if self._writes:
            self._write({"step": step, "event": "validation", **figures})
            shown = "  ".join(f"{name} {value:.5g}" for name, value in figures.items())
            self._reporter.note(f"validation at step {step}  {shown}")

    def close(self) -> None:
        if self._events is not None:
            self._events.close()

    def _line(self) -> dict[str, object]:
        window, last, count = self._window, self._window[-1], len(self._window)
        names = dict.fromkeys(name for report in window for name in report.figures)
        means = {name: fmean(each.figures[name] for each in window if name in each.figures) for name in names}
        parts = dict.fromkeys(name for report in window for name in report.seconds)
        seconds = {name: sum(report.seconds.get(name, 0.0) for report in window) for name in parts}
        total = seconds.pop("total")
        trained = total - sum(seconds.get(name, 0.0) for name in _BESIDE_TRAINING)
        speed = {}
        if trained > 0:
            samples, tokens = (sum(getattr(each, name) for each in window) for name in ("samples", "tokens"))
            speed = {"samples_per_s": round(samples / trained, 3), "tokens_per_s": round(tokens / trained, 1)}
            if self._mfu is not None:
                speed["mfu"] = round(self._mfu(samples, tokens, trained), 4)
        seconds["other"] = total - sum(seconds.values())
        return {
            "step": last.step,
            "epoch": last.epoch,
            **{name: round(mean, 6) for name, mean in means.items()},
            "learning_rate": last.learning_rate,
            "seconds_per_step": round(total / count, 4),
            **speed,
            "data_wait": round(seconds.get("data", 0.0) / trained, 4) if trained > 0 else 0.0,
            **peak_memory_gib(self._device),
            "seconds": {name: round(value / count, 6) for name, value in seconds.items()},
            "skipped": sum(report.skipped for report in window),
        }

    def _write(self, line: Mapping[str, object]) -> None:
        """Write a line to the log and to TensorBoard. A line that the log cannot take waits for the next one."""
        self._unwritten += json.dumps(_finite(line), allow_nan=False).encode() + b"\n"
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer, so that on a full disk it is known how much of a line is written.
            with open(self._log, "ab", buffering=0, opener=open_regular) as file:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                self._reporter.warn(f"cannot write {self._log}: {error.strerror or error}: training continues")
            self._has_warned = True
        event, step = line.get("event", "train"), line["step"]
        if self._events is None or event == "skipped":
            return
        for name, value in line.items():
            if isinstance(value, dict):
                for part, number in value.items():
                    self._events.add_scalar(f"{name}/{part}", number, step)
            elif name != "step" and isinstance(value, int | float):
                self._events.add_scalar(f"{event}/{name}", value, step)
        # A killed run does not write these events again when it is resumed.
        self._events.flush()


_CONSOLE = (
    (
        ("step", "step {:,}"),
        ("loss", "loss {:.4g}"),
        ("learning_rate", "learning rate {:.3g}"),
        ("seconds_per_step", "{:.4g} s/step"),
    ),
    (
        ("grad_norm", "  gradient norm {:.4g}"),
        ("mfu", "MFU {:.1%}"),
        ("data_wait", "data wait {:.1%}"),
        ("peak_allocated_gib", "memory {:.1f} GiB"),
        ("peak_resident_gib", "memory {:.1f} GiB"),
    ),
)
"""Short form of a training line for the terminal: two lines of at most 80 columns."""


def truncate_log(output: Path, *, step: int) -> None:
    """Remove log lines after a step, and broken ones. Raises FileProblem if the log is no regular file."""
    if (path := output / LOG_FILE).exists():
        content = read_bytes(path, max_bytes=MAX_LOG_BYTES, hint="move it out of the run's folder")
        kept = (line for line in content.splitlines(keepends=True) if _step_of(line) <= step)
        write_bytes_atomic(path, b"".join(kept))


def remove_records(output: Path) -> None:
    (output / LOG_FILE).unlink(missing_ok=True)
    for name in (TENSORBOARD_FOLDER, SAMPLES_FOLDER):
        shutil.rmtree(output / name, ignore_errors=True)


def require_tensorboard() -> "type[SummaryWriter]":
    """Return TensorBoard's writer of events. Raises HardwareError if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing_library("watching.tensorboard=true needs TensorBoard", extra="train") from error
    return SummaryWriter


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf  # a partial line from a crash


def _finite(value: object) -> object:
    """Return a value with null instead of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
