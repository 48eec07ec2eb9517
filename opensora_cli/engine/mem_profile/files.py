"""Files of a memory profile: charts, and a history for PyTorch's memory viewer (https://pytorch.org/memory_viz)."""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from opensora_cli.core.device import device_module, is_gpu
from opensora_cli.core.files import atomic_path
from opensora_cli.engine.mem_profile.report import MIB, MemProfile, Timeline, mib
from opensora_cli.media.plots import new_figure
from opensora_cli.memory.counting import TensorBytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = 0.4

_MOST_EVENTS = 200_000
_ALIGNMENT = 512
_OUTSIDE = "outside of modules"


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


@contextmanager
def recorded_history(device: torch.device) -> Iterator[None]:
    """Have the CUDA allocator record every allocation inside the block; no effect on a CPU."""
    if not is_gpu(device):
        yield
        return
    # C++ frames would make the file many times as large, and slow down every allocation.
    record = device_module(device).memory._record_memory_history
    record(max_entries=_MOST_EVENTS, stacks="python", clear_history=True)
    try:
        yield
    finally:
        record(enabled=None)


def write_snapshot(path: Path, counters: Sequence[TensorBytes], *, device: torch.device, replace: bool) -> None:
    """Write the allocator's history on CUDA, or the counted tensors on a CPU, in the same format.
    Raises OutputError if the file cannot be written.
    """
    if is_gpu(device):
        # The history must still be recording, so this is called inside `recorded_history`.
        history: dict[str, Any] = device_module(device).memory._snapshot(device)
    else:
        history = counted_history(counters)
    with atomic_path(path, replace=replace) as temporary:
        temporary.write_bytes(pickle.dumps(history))


def counted_history(counters: Sequence[TensorBytes]) -> dict[str, Any]:
    """Return counted storages as the history of an allocator that gives each storage its own address.

    The frame of an event is the module that made the storage. There are no segments, because nothing stays reserved.
    """
    events: list[dict[str, Any]] = []
    address = 1 << 20
    for counter in counters:
        places: dict[int, tuple[int, int]] = {}
        for change in counter.changes:
            frame = _frame(counter.owner(change) or _OUTSIDE)
            size = change.num_bytes
            if change.storage in places:  # freed, or resized, which is a release and an allocation
                place = places.pop(change.storage)
                events += _freed(*place, frame, len(events))
                size += place[1]
            if size > 0:
                places[change.storage] = address, size
                events.append(_event("alloc", address, size, frame, len(events)))
                address += -(-size // _ALIGNMENT) * _ALIGNMENT
        # Nothing stays allocated for the next stage.
        for place in places.values():
            events += _freed(*place, _frame("end of the stage"), len(events))
    return {"segments": [], "device_traces": [events], "allocator_settings": {}, "external_annotations": []}


def _frame(name: str) -> dict[str, Any]:
    return {"name": name, "filename": "counted by osora mem-profile", "line": 0}


def _freed(address: int, size: int, frame: dict[str, Any], now: int) -> list[dict[str, Any]]:
    return [_event(action, address, size, frame, now) for action in ("free_requested", "free_completed")]


def _event(action: str, address: int, size: int, frame: dict[str, Any], now: int) -> dict[str, Any]:
    # The viewer expects microseconds; these count events.
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": now, "frames": [frame]}
