"""Everything that watches a run, made from its settings, and the files that it leaves."""

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.files import atomic_path
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.components.hardware import peak_memory_gib
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.files import LOG_FILE, PROFILE_FOLDER, SAMPLES_FOLDER, TENSORBOARD_FOLDER
from opensora_cli.engine.train.watching.clocks import Clock, Mark, Observer, StepReport
from opensora_cli.engine.train.watching.flops import ModelFlopsUtilisation, peak_tflops
from opensora_cli.engine.train.watching.lines import LineSink, StepLines
from opensora_cli.engine.train.watching.logs import JsonLog, TensorBoardLog, cut_back
from opensora_cli.engine.train.watching.samples import remove_later
from opensora_cli.settings.train import TrainSettings, TrainTarget
from opensora_cli.settings.train_loop import Compute


class Watching:
    """The clock and the observers of one rank."""

    def __init__(self, clock: Clock, observers: Sequence[Observer] = ()) -> None:
        self.clock = clock
        self.observers = observers

    def start(self, step: int) -> None:
        """Continue after `step`, and count time from now on. Raises OutputError if a file cannot be written."""
        self.clock.take()
        for observer in self.observers:
            observer.start(step)

    def close(self) -> None:
        """Finish what is written; also after an error."""
        for observer in self.observers:
            observer.close()


def open_watching(settings: TrainSettings, *, distribution: Distribution, output: Path, reporter: Reporter) -> Watching:
    """Return what watches a run: the main rank alone writes and reports.
    Raises HardwareError if TensorBoard is not installed, or a setting needs a GPU, and there is none.
    """
    clock = _clock(settings, distribution.device)
    if not distribution.is_main:
        return Watching(clock)
    sinks: list[LineSink] = [JsonLog(output / LOG_FILE, reporter=reporter)]
    if settings.watching.tensorboard:
        sinks.append(TensorBoardLog(output / TENSORBOARD_FOLDER))
    observers: list[Observer] = [
        StepLines(
            sinks,
            every=settings.loop.log_every,
            steps=settings.loop.steps,
            memory=partial(peak_memory_gib, distribution.device),
            mfu=_mfu(settings, distribution),
            exchange=distribution.monitor.take,
            reporter=reporter,
        )
    ]
    if settings.watching.profile_steps is not None:
        observers.append(
            StepProfiler(
                settings.watching.profile_steps, output / PROFILE_FOLDER, device=distribution.device, reporter=reporter
            )
        )
    return Watching(clock, observers)


class StepProfiler:
    """Writes what happens from the first to the last of `steps` of this process as a Chrome trace, `steps10-12.json`.

    A run that ends between them writes what there is; one that is resumed between them writes nothing.
    """

    def __init__(self, steps: tuple[int, int], folder: Path, *, device: torch.device, reporter: Reporter) -> None:
        self._first, self._last = steps
        self._path = folder / f"steps{self._first}-{self._last}.json"
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._reporter = reporter
        self._running: profile | None = None

    def start(self, step: int) -> None:
        """Continue after `step`."""
        if step == self._first - 1:
            self._running = profile(activities=self._activities, record_shapes=True)
            self._running.start()

    def on_step(self, report: StepReport) -> None:
        """Start before the first of the steps, and write the trace after the last.
        Raises OutputError if it cannot be written.
        """
        if self._running is not None and report.step == self._last:
            self.close()
        elif self._running is None:
            self.start(report.step)

    def on_validation(self, step: int, figures: Mapping[str, float]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Write what was recorded, if that has not been done yet. Raises OutputError if it cannot be written."""
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        with atomic_path(self._path) as temporary:
            running.export_chrome_trace(str(temporary))
        self._reporter.note(f"profile: {self._path}")


def truncate_records(output: Path, *, step: int) -> None:
    """Remove what comes after a step from a run's log and samples; TensorBoard's events are marked void instead.
    Raises OutputError if that is not possible.
    """
    cut_back(output / LOG_FILE, step=step)
    remove_later(output / SAMPLES_FOLDER, step=step)


def remove_records(output: Path) -> None:
    """Remove the records of an earlier run."""
    (output / LOG_FILE).unlink(missing_ok=True)
    for name in (TENSORBOARD_FOLDER, PROFILE_FOLDER, SAMPLES_FOLDER):
        shutil.rmtree(output / name, ignore_errors=True)


def _clock(settings: TrainSettings, device: torch.device) -> Clock:
    watching = settings.watching
    if device.type != "cuda":
        given = " and ".join(f"watching.{name}=true" for name in ("exact_timers", "nvtx") if getattr(watching, name))
        if given:
            raise HardwareError(f"{given} needs a GPU, and this runs on a CPU", hint=f"leave {given} out")
    marks: list[Mark] = []
    if watching.profile_steps is not None:
        marks.append(torch.profiler.record_function)
    if watching.nvtx:
        marks.append(torch.cuda.nvtx.range)
    if watching.exact_timers:
        return Clock(marks=marks, wait=partial(torch.cuda.synchronize, device))
    return Clock(marks=marks)


def _mfu(settings: TrainSettings, distribution: Distribution) -> ModelFlopsUtilisation | None:
    """Return what measures the utilisation, or None where the peak is not known: on a CPU, in fp32."""
    if settings.target is not TrainTarget.MMDIT:
        return None
    peak, precision = settings.watching.peak_tflops, settings.precision
    if peak is None and distribution.device.type == "cuda":
        is_half = precision.compute is Compute.BF16
        peak = peak_tflops(torch.cuda.get_device_name(distribution.device)) if is_half else None
    if peak is None:
        return None
    return ModelFlopsUtilisation(
        mmdit_config(settings.model),
        text_tokens=settings.text.t5_max_length,
        peak_tflops=peak,
        devices=distribution.ranks,
        is_frozen=settings.lora.is_on,
    )
