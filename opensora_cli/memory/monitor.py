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
    """Return the peak bytes that `run` adds: of the allocator on CUDA, else of counted tensors.

    More than `limit` counted bytes raise MemoryError.
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
        return cls(len(seconds), fmean(seconds), stdev(seconds) if len(seconds) > 1 else 0.0)


class ModuleTimes:
    """Timer of the forward calls of modules: by the clock on a CPU, and by events on a GPU, without synchronization."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def watch(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Time every call of these modules inside the context, each under its name."""
        removers: list[Callable[[], None]] = []
        for name, module in modules.items():
            starts: list[Any] = []

            def enter(*_: object, starts: list[Any] = starts) -> None:
                starts.append(self._now())

            def leave(*_: object, name: str = name, starts: list[Any] = starts) -> None:
                self._spans.setdefault(name, []).append((starts.pop(), self._now()))

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
        between = seconds_between if has_streams(self._device) else lambda start, end: end - start
        return {name: Spread.of([between(*span) for span in spans]) for name, spans in self._spans.items()}

    def _now(self) -> Any:
        return timing_event(self._device) if has_streams(self._device) else time.perf_counter()
