"""Time and memory of a program's phases and of a model's blocks."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

from opensora_cli.core.device import (
    GIB,
    allocated_bytes,
    current_device,
    has_peaks,
    has_streams,
    peak_allocated_bytes,
    peak_reserved_bytes,
    reset_peaks,
    seconds_between,
    synchronize,
    timing_event,
)


@dataclass(frozen=True, slots=True)
class ProfiledPhase:
    """Time and memory of one phase of a program."""

    name: str
    seconds: float
    """Wall-clock time until the device had finished."""
    allocated_gib: float | None
    """Memory in use on the device at the end of the phase; None without a GPU."""
    peak_allocated_gib: float | None
    """Peak of the memory in use during the phase."""
    peak_reserved_gib: float | None
    """Peak of the memory that torch's allocator reserved on the GPU during the phase."""


class AccelerationProfiler:
    """Profiler of the time and GPU memory of named phases, one after the other; without a GPU, only of the time.

    The default `device` is the first GPU if there is one.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        chosen = current_device() if device is None else torch.device(device)
        self._gpu = chosen if has_peaks(chosen) else None
        self.phases: list[ProfiledPhase] = []

    @contextmanager
    def profile(self, name: str) -> Iterator[None]:
        """Measure the context as the phase `name`, even if it fails. Phases do not nest: each resets the peak."""
        if self._gpu is not None:
            synchronize(self._gpu)
            reset_peaks(self._gpu)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases.append(self._finished(name, start))

    def summary(self) -> list[str]:
        """Return one line for each phase."""
        lines = []
        for phase in self.phases:
            memory = "no GPU to measure memory on"
            if phase.peak_allocated_gib is not None:
                memory = f"{phase.allocated_gib:.3f} GiB at the end, {phase.peak_allocated_gib:.3f} GiB at most"
                memory += f", {phase.peak_reserved_gib:.3f} GiB reserved"
            lines.append(f"{phase.name}: {phase.seconds:.3f} s, {memory}")
        return lines

    def _finished(self, name: str, start: float) -> ProfiledPhase:
        if self._gpu is None:
            return ProfiledPhase(name, time.perf_counter() - start, None, None, None)
        synchronize(self._gpu)
        return ProfiledPhase(
            name,
            time.perf_counter() - start,
            allocated_bytes(self._gpu) / GIB,
            peak_allocated_bytes(self._gpu) / GIB,
            peak_reserved_bytes(self._gpu) / GIB,
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and deviation of repeated measurements, in seconds."""

    count: int
    mean_s: float
    deviation_s: float
    """Sample standard deviation (n-1); 0 for a single measurement."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Return the mean and deviation of at least one measurement."""
        return cls(len(seconds), fmean(seconds), stdev(seconds) if len(seconds) > 1 else 0.0)


class ModuleTimes:
    """Timer of the forward calls of modules: by the clock on a CPU, and by events on a GPU, without synchronization."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._seconds: dict[str, list[float]] = {}
        self._events: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def watch(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Time every call of these modules inside the context, each under its name."""
        removers: list[Callable[[], None]] = []
        for name, module in modules.items():
            enter, leave = self._event_hooks(name) if has_streams(self._device) else self._clock_hooks(name)
            # Outside of other hooks, so that streaming of weights and offloading of activations count.
            removers.append(module.register_forward_pre_hook(enter, prepend=True).remove)
            removers.append(module.register_forward_hook(leave).remove)
        try:
            yield
        finally:
            for remove in removers:
                remove()

    def clear(self) -> None:
        """Delete all times."""
        self._seconds.clear()
        self._events.clear()

    def spreads(self) -> dict[str, Spread]:
        """Return the mean and deviation over the calls of each called module. It waits for the device."""
        synchronize(self._device)
        timed = {name: [seconds_between(start, end) for start, end in events] for name, events in self._events.items()}
        return {name: Spread.of(seconds) for name, seconds in {**self._seconds, **timed}.items() if seconds}

    def _clock_hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        starts: list[float] = []

        def leave(*_: object) -> None:
            self._seconds.setdefault(name, []).append(time.perf_counter() - starts.pop())

        return lambda *_: starts.append(time.perf_counter()), leave

    def _event_hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        starts: list[Any] = []

        def leave(*_: object) -> None:
            self._events.setdefault(name, []).append((starts.pop(), timing_event(self._device)))

        return lambda *_: starts.append(timing_event(self._device)), leave


def blocks_of(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """Return the blocks of a model, the entries of its outermost `ModuleList`s, by paths that begin with `name`."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules(prefix=name):
        is_inside = any(f"{path}.".startswith(f"{block}.") for block in found)
        if isinstance(module, nn.ModuleList) and not is_inside:
            found |= {f"{path}.{index}": block for index, block in enumerate(module)}
    return found
