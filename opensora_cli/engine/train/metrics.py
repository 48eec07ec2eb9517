"""Metrics of a run: console lines, `log.jsonl`, TensorBoard, profile, and MFU."""

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from opensora_cli.core.device import is_gpu, peak_memory_gib, profiler_range, synchronize
from opensora_cli.core.exceptions import HardwareError, OutputError, missing_library
from opensora_cli.core.files import atomic_path, write_bytes_atomic
from opensora_cli.core.progress import Reporter
from opensora_cli.core.reading import require_file
from opensora_cli.core.regular_files import open_regular
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.early import LOG_FILE, PROFILE_FOLDER, SAMPLES_FOLDER, TENSORBOARD_FOLDER
from opensora_cli.engine.train.evaluate import remove_later_samples
from opensora_cli.engine.train.predicted import open_mfu
from opensora_cli.engine.train.trainer import Clock, StepReport
from opensora_cli.media.encode import gif_bytes
from opensora_cli.settings.train import TrainSettings

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_BESIDE_TRAINING = ("checkpoint", "validation", "samples")
_GIF_SIDE = 320
"""Longest side, in pixels, of samples in TensorBoard."""
_MOVE_OUT = "move it out of the run's folder"


class Metrics:
    """Writer of a line with means over every few steps, and of a line for each validation and each skipped step.

    Lines go to `log.jsonl` and, if TensorBoard is on, to events such as `train/loss`, `validation/loss` and
    `seconds/data`. The terminal shows a short form of each line. Only the main rank writes and reports. Raises
    HardwareError if TensorBoard or a required GPU is missing.
    """

    def __init__(
        self, settings: TrainSettings, *, distribution: Distribution, output: Path, reporter: Reporter
    ) -> None:
        self.clock = _open_clock(settings, distribution.device)
        self._writes = distribution.is_main
        self._every = settings.loop.log_every
        self._total_steps = settings.loop.steps
        self._device = distribution.device
        self._mfu = open_mfu(settings, distribution)
        self._output = output
        self._reporter = reporter
        self._log = JsonLog(output / LOG_FILE, reporter=reporter)
        has_events = settings.watching.tensorboard and self._writes
        self._open_events = require_tensorboard() if has_events else None
        self._events: SummaryWriter | None = None
        self._profile_steps = settings.watching.profile_steps if self._writes else None
        self._profile: profile | None = None
        self._window: list[StepReport] = []
        """Steps of the unfinished line."""
        self._past: list[float] = []
        """Seconds of each step since the start, with validation, samples and checkpoints."""

    def start(self, step: int) -> None:
        """Continue after `step`, and count time from now on. Raises OutputError if events cannot be written."""
        self.clock.take()
        self._start_profile(step)
        if self._open_events is not None:
            folder = self._output / TENSORBOARD_FOLDER
            try:
                # `purge_step` discards events of later steps.
                self._events = self._open_events(str(folder), purge_step=step + 1)
            except OSError as error:
                raise OutputError(f"cannot write {folder}: {error.strerror or error}") from error

    def on_step(self, report: StepReport) -> None:
        """Add a step, and write a line every few steps. Raises OutputError if a profile cannot be written."""
        if not self._writes:
            return
        self._window.append(report)
        if report.skipped:
            self._write({"step": report.step, "event": "skipped", "samples": list(report.paths)})
        self._past.append(report.seconds["total"])
        if report.step % self._every == 0:
            line = self._line()
            self._write(line)
            for text in console_lines(line):
                self._reporter.note(text)
            self._window = []
        if self._profile_steps is not None and report.step == self._profile_steps[1]:
            self._write_profile()
        self._start_profile(report.step)

    def on_validation(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the line of a validation."""
        if self._writes:
            self._write({"step": step, "event": "validation", **figures})
            shown = "  ".join(f"{name} {value:.5g}" for name, value in figures.items())
            self._reporter.note(f"validation at step {step}  {shown}")

    def on_sample(self, step: int, name: str, frames_THWC: Tensor, fps: float) -> None:
        """Show a sample video in TensorBoard, as a small GIF animation."""
        if self._events is None or self._events.file_writer is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        factor = max(1, -(-max(frames_THWC.shape[1:3]) // _GIF_SIDE))
        small_THWC = frames_THWC[:, ::factor, ::factor]
        _, height, width, channels = small_THWC.shape
        gif = gif_bytes(small_THWC, fps=fps, metadata={})
        image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=gif)
        summary = Summary(value=[Summary.Value(tag=f"samples/{name}", image=image)])
        self._events.file_writer.add_summary(summary, step)
        self._events.flush()

    def close(self) -> None:
        """Close all files, also after an error. Raises OutputError if a profile cannot be written."""
        self._log.close()
        if self._events is not None:
            self._events.close()
        self._write_profile()

    def _line(self) -> dict[str, object]:
        last, count = self._window[-1], len(self._window)
        figures: defaultdict[str, list[float]] = defaultdict(list)
        sums: defaultdict[str, float] = defaultdict(float)
        for report in self._window:
            for name, value in report.figures.items():
                figures[name].append(value)
            for name, value in report.seconds.items():
                sums[name] += value
        total = sums.pop("total")
        seconds = {**sums, "other": total - sum(sums.values())}
        trained = total - sum(seconds.get(name, 0.0) for name in _BESIDE_TRAINING)
        return {
            "step": last.step,
            "epoch": last.epoch,
            **{name: round(fmean(values), 6) for name, values in figures.items()},
            "learning_rate": last.learning_rate,
            "seconds_per_step": round(total / count, 4),
            **self._speed(trained),
            "data_wait": round(seconds.get("data", 0.0) / trained, 4) if trained > 0 else 0.0,
            **peak_memory_gib(self._device),
            "eta_s": round((self._total_steps - last.step) * self._usual_seconds(), 1),
            "seconds": {name: round(value / count, 6) for name, value in seconds.items()},
            "skipped": sum(report.skipped for report in self._window),
        }

    def _usual_seconds(self) -> float:
        # The first step also warms up.
        return fmean(self._past[1:] or self._past)

    def _speed(self, seconds: float) -> dict[str, float]:
        if seconds <= 0:
            return {}
        samples = sum(report.samples for report in self._window)
        tokens = sum(report.tokens for report in self._window)
        mfu = {} if self._mfu is None else {"mfu": round(self._mfu(samples, tokens, seconds), 4)}
        return {"samples_per_s": round(samples / seconds, 3), "tokens_per_s": round(tokens / seconds, 1), **mfu}

    def _write(self, line: Mapping[str, object]) -> None:
        self._log.write(line)
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

    def _start_profile(self, step: int) -> None:
        # A run that is resumed between the first and the last step writes no profile.
        if self._profile_steps is not None and step == self._profile_steps[0] - 1:
            gpu = [ProfilerActivity.CUDA] if is_gpu(self._device) else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)
            self._profile.start()

    def _write_profile(self) -> None:
        running, self._profile = self._profile, None
        if running is None or self._profile_steps is None:
            return
        running.stop()
        first, last = self._profile_steps
        path = self._output / PROFILE_FOLDER / f"steps{first}-{last}.json"
        with atomic_path(path) as temporary:
            running.export_chrome_trace(str(temporary))
        self._reporter.note(f"profile: {path}")


def _open_clock(settings: TrainSettings, device: torch.device) -> Clock:
    watching = settings.watching
    if not is_gpu(device):
        given = " and ".join(f"watching.{name}=true" for name in ("exact_timers", "nvtx") if getattr(watching, name))
        if given:
            raise HardwareError(f"{given} needs a GPU, and this runs on a CPU", hint=f"leave {given} out")
    marks: list[Callable[[str], AbstractContextManager[object]]] = []
    if watching.profile_steps is not None:
        marks.append(torch.profiler.record_function)
    if watching.nvtx:
        marks.append(profiler_range)
    if watching.exact_timers:
        return Clock(marks=marks, wait=partial(synchronize, device))
    return Clock(marks=marks)


_LINES: tuple[dict[str, str], ...] = (
    {
        "step": "step {:,}",
        "loss": "loss {:.4g}",
        "learning_rate": "learning rate {:.3g}",
        "seconds_per_step": "{:.4g} s/step",
    },
    {
        "grad_norm": "  gradient norm {:.4g}",
        "mfu": "MFU {:.1%}",
        "data_wait": "data wait {:.1%}",
        "peak_allocated_gib": "memory {:.1f} GiB",
        "peak_resident_gib": "memory {:.1f} GiB",
    },
)


def console_lines(line: Mapping[str, object]) -> list[str]:
    """Return the short form of a training line for the terminal: two lines of at most 80 columns.

    The remaining time is not in it because the progress of the stage shows it.
    """
    return [
        "  ".join(form.format(line[name]) for name, form in forms.items() if line.get(name) is not None)
        for forms in _LINES
    ]


class JsonLog:
    """Log file of JSON lines. Lines that cannot be written are kept for the next write, with a warning."""

    def __init__(self, path: Path, *, reporter: Reporter) -> None:
        self._path = path
        self._reporter = reporter
        self._waiting: list[str] = []
        self._whole: int | None = None
        """Size of the file before the first kept line."""

    def write(self, line: Mapping[str, object]) -> None:
        """Write a line after the kept ones. Numbers that are not finite become null."""
        self._waiting.append(json.dumps(_finite(line), allow_nan=False) + "\n")
        self._write_waiting("its lines are kept until that is possible" if len(self._waiting) == 1 else None)

    def close(self) -> None:
        """Write the kept lines, which are lost if that still fails."""
        if self._waiting:
            self._write_waiting(f"it lacks the last {len(self._waiting)} lines")
            self._waiting.clear()

    def _write_waiting(self, effect: str | None) -> None:
        """Write the kept lines. If that fails, warn of the effect, if there is one."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", opener=open_regular) as log:
                end = log.tell()
                self._whole = end if self._whole is None else min(self._whole, end)
                # A full disk may contain a part of the lines that are written again now.
                log.truncate(self._whole)
                log.write("".join(self._waiting).encode())
        except OSError as error:
            if effect:
                self._reporter.warn(f"cannot write {self._path}: {error.strerror or error}: {effect}")
        else:
            self._waiting.clear()
            self._whole = None


def truncate_records(output: Path, *, step: int) -> None:
    """Remove log lines and samples after a step. Raises FileProblem if this is not possible."""
    path = output / LOG_FILE
    if path.exists():
        require_file(path, hint=_MOVE_OUT)
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise OutputError(f"cannot read {path}: {reason}", hint=_MOVE_OUT) from error
        kept = "".join(line for line in lines if _step_of(line) <= step)
        write_bytes_atomic(path, kept.encode())
    remove_later_samples(output / SAMPLES_FOLDER, step=step)


def remove_records(output: Path) -> None:
    """Remove the records of an earlier run."""
    (output / LOG_FILE).unlink(missing_ok=True)
    for name in (TENSORBOARD_FOLDER, PROFILE_FOLDER, SAMPLES_FOLDER):
        shutil.rmtree(output / name, ignore_errors=True)


def require_tensorboard() -> "type[SummaryWriter]":
    """Return TensorBoard's writer of events. Raises HardwareError if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing_library("watching.tensorboard=true needs TensorBoard", extra="train") from error
    return SummaryWriter


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")  # a partial line from a crash


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
