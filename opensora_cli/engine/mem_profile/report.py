"""The result of a memory profile: a document, lines for people, and a chart."""

from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, ClassVar, Self

from opensora_cli.core.documents import Document
from opensora_cli.engine.estimate.offload import HostMemory
from opensora_cli.media.plots import new_figure
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.memory.monitor import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20

_TIMELINE_POINTS = 160
_LISTED_MODULES = 8
_BAR = 0.4


class Part(Document):
    """One kind of memory of a stage at its peak."""

    name: str
    predicted_bytes: int
    measured_bytes: int | None
    """Measured bytes; None means not measured."""

    def line(self) -> str:
        return f"  {self.name:34}{mib(self.predicted_bytes):>14}{mib(self.measured_bytes):>14}"


def parts_of(predicted: Mapping[str, int], measured: Mapping[str, int] | None = None) -> tuple[Part, ...]:
    """Return the kinds of memory of a stage, from their bytes by name."""
    real = measured or {}
    return tuple(
        Part(name=name, predicted_bytes=size, measured_bytes=real.get(name)) for name, size in predicted.items()
    )


class ModuleShare(Document):
    """Memory of a part of a model."""

    name: str
    parameters: int
    weight_bytes: int
    activation_bytes: int
    """Bytes that the forward allocated, and that are alive at the peak of the stage."""

    def line(self) -> str:
        sizes = f"{mib(self.weight_bytes):>14}{mib(self.activation_bytes):>14}"
        return f"  {self.name:46}{self.parameters:>14,}{sizes}"


class Timeline(Document):
    """Live bytes over a stage. The unit of time is a change: the allocation or release of a tensor."""

    live_bytes: tuple[int, ...]
    """Largest number of live bytes in each of several equal parts of the changes."""
    marks: tuple[tuple[str, float], ...]
    """Name and position of each mark, from 0 to 1."""

    @classmethod
    def of(cls, counter: TensorBytes) -> Self:
        """Return the timeline of a counter, reduced to a few points."""
        count = max(len(counter.changes), 1)
        points = [0] * min(count, _TIMELINE_POINTS)
        live = 0
        for position, change in enumerate(counter.changes):
            live += change.num_bytes
            slot = position * len(points) // count
            points[slot] = max(points[slot], live)
        marks = tuple((mark.name, mark.position / count) for mark in counter.marks)
        return cls(live_bytes=tuple(points), marks=marks)


class StageProfile(Document):
    """Predicted and measured memory of one stage."""

    name: str
    parts: tuple[Part, ...]
    predicted_bytes: int
    """Predicted peak."""
    measured_bytes: int | None = None
    """Measured peak of the allocator on CUDA, or of counted tensors on a CPU; None means not measured."""
    not_measured: str | None = None
    """Reason why the stage was not measured."""
    modules: tuple[ModuleShare, ...] = ()
    timeline: Timeline | None = None
    times: Mapping[str, Spread] = {}
    """Seconds of the stage, then of each call of a block in the order of the models, in the runs after a first one. On
    CUDA the device times blocks by events."""

    def lines(self) -> list[str]:
        """Return a table for people."""
        peak = Part(name="peak", predicted_bytes=self.predicted_bytes, measured_bytes=self.measured_bytes)
        found = [f"{self.name:36}{'predicted':>14}{'measured':>14}", *(part.line() for part in (*self.parts, peak))]
        if self.measured_bytes:
            found[-1] += f"   predicted / measured {self.predicted_bytes / self.measured_bytes:.3f}"
        if self.not_measured:
            found.append(f"  not measured: {self.not_measured}")
        if self.modules:
            found.append(f"  {'module':46}{'parameters':>14}{'weights':>14}{'activations':>14}")
            found += [share.line() for share in self.modules[:_LISTED_MODULES]]
        if self.times:
            found.append(f"  {'time':40}{'calls':>7}{'mean ms':>14}{'deviation':>12}")
        for name, time in self.times.items():
            found.append(f"    {name:38}{time.count:>7}{time.mean_s * 1e3:>14,.3f}{time.deviation_s * 1e3:>12,.3f}")
        return found


class AttentionCost(Document):
    """Cost of one kind of attention over a number of tokens, without gradients."""

    kind: str
    tokens: int
    memory_bytes: int | None = None
    """Bytes at the peak, without the inputs."""
    seconds: float | None = None
    reason: str | None = None

    def line(self) -> str:
        if self.memory_bytes is None or self.seconds is None:
            return f"  {self.kind:24}{self.tokens:>10,}   {self.reason}"
        return f"  {self.kind:24}{self.tokens:>10,}{mib(self.memory_bytes):>16}{self.seconds * 1e3:>11.1f} ms"


class LargestBatch(Document):
    """Result of the search for the largest batch."""

    batch_size: int
    """Largest batch that fits; 0 means that not even one clip fits."""
    limit_bytes: int
    peak_bytes: int
    """Predicted peak of the largest batch."""

    def line(self) -> str:
        if not self.batch_size:
            return f"not even 1 clip fits into {mib(self.limit_bytes)}"
        needed = f"{mib(self.peak_bytes)} at the peak (predicted)"
        return f"{self.batch_size} fits into {mib(self.limit_bytes)}: {needed}"


class MemProfile(Document):
    """Whole memory profile: a document of the schema `osora.mem-profile/6`."""

    SCHEMA: ClassVar[str | None] = "osora.mem-profile/6"

    verdict: str
    """Whether the run fits, its memory, and its predicted time, as `--dry-run` says it."""
    fits: bool | None
    """Whether the run fits in memory. None means unknown."""
    host: HostMemory | None
    """Host memory of a machine."""
    of: str
    device: str
    device_name: str
    how: str
    """Description of the measurement in a sentence."""
    stages: tuple[StageProfile, ...]
    notes: tuple[str, ...] = ()
    attention: tuple[AttentionCost, ...] = ()
    batch: LargestBatch | None = None
    files: dict[str, str]
    """Written files: kind -> path."""

    def lines(self) -> list[str]:
        """Return the profile for people."""
        found = [
            self.verdict,
            f"profile     {self.of} on {self.device} ({self.device_name})",
            f"measured    {self.how}",
        ]
        for stage in self.stages:
            found += ["", *stage.lines()]
        found.append("")
        if self.device != "cpu" and self.host is not None:
            found.append(f"host        {self.host.line()}")
        found += [f"note        {note}" for note in self.notes]
        if self.attention:
            found += ["", f"  {'attention':24}{'tokens':>10}{'memory':>16}{'time':>14}"]
            found += [cost.line() for cost in self.attention]
        if self.batch:
            found += ["", f"batch       {self.batch.line()}"]
        return [*found, *(f"wrote       {path}" for path in self.files.values())]


def module_shares(by_weight: Mapping[str, tuple[int, int]], made: Mapping[str, int]) -> tuple[ModuleShare, ...]:
    """Return the stacks of models, such as `model.double_blocks`, the largest first.

    `by_weight` maps a name to the number of parameters and bytes of a weight, and `made` the name of a module to the
    bytes that its forward allocated.
    """
    shares: dict[str, list[int]] = {}
    rows = [(name.rpartition(".")[0], (*sizes, 0)) for name, sizes in by_weight.items()]
    for path, sizes in (*rows, *((name, (0, 0, size)) for name, size in made.items() if name)):
        stack = ".".join([*takewhile(lambda part: not part.isdigit(), path.split("."))][:3])
        shares[stack] = [*map(sum, zip(shares.get(stack, (0, 0, 0)), sizes, strict=True))]
    found = (
        ModuleShare(name=name, parameters=parameters, weight_bytes=weights, activation_bytes=activations)
        for name, (parameters, weights, activations) in shares.items()
    )
    return tuple(sorted(found, key=lambda share: -(share.weight_bytes + share.activation_bytes)))


def mib(size: int | None) -> str:
    """Return bytes for people, always in the same unit, so that columns are comparable."""
    return "-" if size is None else f"{size / MIB:,.2f} MiB"


def profile_figure(profile: MemProfile) -> "Figure":
    """Return the figure. Raises HardwareError if matplotlib cannot be imported."""
    timelines = [(stage.name, stage.timeline) for stage in profile.stages if stage.timeline is not None]
    figure = new_figure(height=3.0 + 2.5 * len(timelines))
    peaks, *curves = figure.subplots(1 + len(timelines), 1, squeeze=False)[:, 0]
    # Names are plain text: two dollar signs would begin a formula.
    figure.suptitle(f"Memory of {profile.of}\n{profile.device} ({profile.device_name})", parse_math=False)
    _plot_peaks(peaks, profile)
    for axes, (name, timeline) in zip(curves, timelines, strict=True):
        _plot_timeline(axes, name, timeline)
    return figure


def _plot_peaks(axes: "Axes", profile: MemProfile) -> None:
    rows = list(range(len(profile.stages)))
    predicted = [stage.predicted_bytes for stage in profile.stages]
    measured = [stage.measured_bytes for stage in profile.stages]
    for label, shift, sizes in (("predicted", -_BAR / 2, predicted), ("measured", _BAR / 2, measured)):
        bars = axes.barh([row + shift for row in rows], [(size or 0) / MIB for size in sizes], _BAR, label=label)
        axes.bar_label(bars, [mib(size) for size in sizes], padding=3)
    axes.set_yticks(rows, [stage.name for stage in profile.stages])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("peak (MiB)")
    axes.legend()


def _plot_timeline(axes: "Axes", name: str, timeline: Timeline) -> None:
    sizes = [size / MIB for size in timeline.live_bytes]
    steps = max(len(sizes) - 1, 1)
    axes.plot([index / steps for index in range(len(sizes))], sizes)
    for mark, place in timeline.marks:
        axes.axvline(place, linestyle=":", color="gray")
        axes.annotate(
            mark,
            (place, 0),
            xytext=(-3 if place > 0.5 else 3, 3),
            textcoords="offset points",
            parse_math=False,
            ha="right" if place > 0.5 else "left",
        )
    axes.set_ylim(bottom=0)
    axes.set_title(name, parse_math=False)
    axes.set_ylabel("in use (MiB)")
    axes.set_xlabel("allocations and releases, from first to last")
