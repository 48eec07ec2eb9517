"""Peak memory of a call, times of a model's blocks, and the mean and deviation of repeated measurements."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

from opensora_cli.core.device import (
    allocated_bytes,
    has_peaks,
    has_streams,
    peak_allocated_bytes,
    seconds_between,
    start_peak_memory,
    synchronize,
    timed,
    timing_event,
)
from opensora_cli.memory.counting import TensorBytes


def peak_bytes(run: Callable[[], object], *, device: torch.device, limit: int | None = None) -> int:
    """Return the peak of memory that `run` adds: of the allocator on CUDA, and of counted tensors on a CPU.

    Raises MemoryError if more than `limit` bytes are counted on a CPU.
    """
    if has_peaks(device):
        before = allocated_bytes(device)
        start_peak_memory(device)
        timed(run, device)
        return peak_allocated_bytes(device) - before
    with TensorBytes(limit=limit) as counter:
        run()
    return counter.peak_bytes


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
