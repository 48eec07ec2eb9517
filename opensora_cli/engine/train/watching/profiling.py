"""A profile of some steps, for chrome://tracing, Perfetto and TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from opensora_cli.core.files import atomic_path
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.train.watching.clocks import StepReport


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
