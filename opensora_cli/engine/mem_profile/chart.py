"""Figure of a profile: the peaks of all stages, and the live bytes over each measured stage."""

from typing import TYPE_CHECKING

from opensora_cli.engine.mem_profile.report import MIB, MemProfile, Timeline, mib
from opensora_cli.media.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = 0.4


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
