"""Verdict of a plan, its first line, with the host memory and the predicted time of a run."""

from collections.abc import Mapping
from typing import Literal, Self

from opensora_cli.core.device import GIB
from opensora_cli.core.documents import Document
from opensora_cli.core.formatting import duration
from opensora_cli.engine.estimate.predicted_time import Seconds
from opensora_cli.settings.hardware import GpuSettings


class HostMemory(Document):
    """Host memory of a machine, in addition to the memory of its devices."""

    pinned_bytes: int
    """Page-locked copies of weights, and offloaded activations and optimizer states."""
    page_cache_bytes: int
    """Files of weights. With less memory the run still works, and reads them from the disk again."""

    def line(self) -> str:
        """Return the parts as text."""
        return f"page-locked {gib(self.pinned_bytes)}, page cache {gib(self.page_cache_bytes)} for files of weights"


class PredictedTime(Document):
    """Predicted seconds of a run, which were not measured."""

    predicted: Literal[True] = True
    hardware: str
    """Number and name of the GPUs, such as `8xH100`."""
    of: str
    """Work that takes this time."""
    seconds: float
    stages_s: Mapping[str, float]
    parts_s: Mapping[str, float]
    """Seconds of each part, the largest first; time that overlaps with another part is not counted."""
    left_out: str
    """Work that the prediction excludes."""

    @classmethod
    def of_stages(
        cls, stages: Mapping[str, Seconds], gpu: GpuSettings, *, devices: int, of: str, left_out: str
    ) -> Self:
        """Return the document of stages that run one after the other."""
        parts = sum(stages.values(), Seconds())
        return cls(
            hardware=f"{devices}x{gpu.name}",
            of=of,
            seconds=parts.total,
            stages_s={name: seconds.total for name, seconds in stages.items()},
            parts_s=dict(sorted(parts.items(), key=lambda item: -item[1])),
            left_out=left_out,
        )

    def lines(self) -> list[str]:
        """Return the prediction for people."""
        return [
            f"predicted {_shown(self.seconds)} {self.of} on {self.hardware}, not measured: {_joined(self.stages_s)}",
            f"parts     {_joined(self.parts_s)}",
            f"left out  {self.left_out}",
        ]


def verdict_line(*, needed: int, usable: int | None, on_gpu: bool, host: HostMemory, seconds: float | None) -> str:
    """Return the verdict of a plan for a device with `usable` bytes; None means that its memory is not known."""
    memory = "GPU memory" if on_gpu else "host memory"
    if usable is None:
        shown = f"Unknown: {gib(needed)} {memory}"
    else:
        shown = f"{'Fits' if needed <= usable else 'Does not fit'}: {needed / GIB:.1f} of {gib(usable)} {memory}"
    if on_gpu:
        shown += f", {gib(host.pinned_bytes + host.page_cache_bytes)} host memory"
    elif host.page_cache_bytes >= 0.05 * GIB:
        shown += f", {gib(host.page_cache_bytes)} page cache"
    return shown if seconds is None else f"{shown}, about {_about(seconds)} (predicted)"


def gib(num_bytes: int) -> str:
    """Return a size with one decimal."""
    return f"{num_bytes / GIB:.1f} GiB"


def _about(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _joined(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_shown(each)}" for name, each in seconds.items() if each >= 0.0005)


def _shown(seconds: float) -> str:
    return duration(seconds) if seconds >= 100 else f"{seconds:.3g} s"
