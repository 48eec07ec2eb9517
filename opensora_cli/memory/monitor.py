"""Time and memory of a program's phases and of a model's blocks, and logging of memory use."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import nn

GIB = 2**30
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProfiledPhase:
    """Time and memory of one phase of a program."""

    name: str
    seconds: float
    """Wall-clock time until the device had finished."""
    allocated_gib: float | None
    """Memory in use on the device at the end of the phase; None without CUDA."""
    peak_allocated_gib: float | None
    """Peak of the memory in use during the phase."""
    peak_reserved_gib: float | None
    """Peak of the memory that torch's allocator reserved on the GPU during the phase."""


class AccelerationProfiler:
    """Profiler of the time and CUDA memory of named phases, one after the other; without CUDA, only of the time.

    The default `device` is the current CUDA device if there is one.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._cuda = chosen if chosen.type == "cuda" else None
        self.phases: list[ProfiledPhase] = []

    @contextmanager
    def profile(self, name: str) -> Iterator[None]:
        """Measure the context as the phase `name`, even if it fails. Phases do not nest: each resets the peak."""
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
            torch.cuda.reset_peak_memory_stats(self._cuda)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases.append(self._finished(name, start))

    def summary(self) -> list[str]:
        """Return one line for each phase."""
        lines = []
        for phase in self.phases:
            memory = "no CUDA device to measure memory on"
            if phase.peak_allocated_gib is not None:
                memory = f"{phase.allocated_gib:.3f} GiB at the end, {phase.peak_allocated_gib:.3f} GiB at most"
                memory += f", {phase.peak_reserved_gib:.3f} GiB reserved"
            lines.append(f"{phase.name}: {phase.seconds:.3f} s, {memory}")
        return lines

    def _finished(self, name: str, start: float) -> ProfiledPhase:
        if self._cuda is None:
            return ProfiledPhase(name, time.perf_counter() - start, None, None, None)
        torch.cuda.synchronize(self._cuda)
        return ProfiledPhase(
            name,
            time.perf_counter() - start,
            torch.cuda.memory_allocated(self._cuda) / GIB,
            torch.cuda.max_memory_allocated(self._cuda) / GIB,
            torch.cuda.max_memory_reserved(self._cuda) / GIB,
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
    """Timer of the forward calls of modules: by the clock on a CPU, and by events on CUDA, without synchronization."""

    def __init__(self, device: torch.device | str) -> None:
        self._is_cuda = torch.device(device).type == "cuda"
        self._seconds: dict[str, list[float]] = {}
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    @contextmanager
    def watch(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Time every call of these modules inside the context, each under its name."""
        removers: list[Callable[[], None]] = []
        for name, module in modules.items():
            enter, leave = self._event_hooks(name) if self._is_cuda else self._clock_hooks(name)
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
        if self._is_cuda:
            torch.cuda.synchronize()
        timed = {
            name: [start.elapsed_time(end) / 1e3 for start, end in events] for name, events in self._events.items()
        }
        return {name: Spread.of(seconds) for name, seconds in {**self._seconds, **timed}.items() if seconds}

    def _clock_hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        starts: list[float] = []

        def leave(*_: object) -> None:
            self._seconds.setdefault(name, []).append(time.perf_counter() - starts.pop())

        return lambda *_: starts.append(time.perf_counter()), leave

    def _event_hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        starts: list[torch.cuda.Event] = []

        def recorded() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            return event

        def leave(*_: object) -> None:
            self._events.setdefault(name, []).append((starts.pop(), recorded()))

        return lambda *_: starts.append(recorded()), leave


def blocks_of(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """Return the blocks of a model, the entries of its outermost `ModuleList`s, by paths that begin with `name`."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules(prefix=name):
        is_inside = any(f"{path}.".startswith(f"{block}.") for block in found)
        if isinstance(module, nn.ModuleList) and not is_inside:
            found |= {f"{path}.{index}": block for index, block in enumerate(module)}
    return found


def log_cuda_memory(stage: str | None = None) -> None:
    """Log the CUDA memory that is in use and reserved at a stage; without CUDA, log that there is no device."""
    _log("CUDA memory", stage, torch.cuda.memory_allocated, torch.cuda.memory_reserved)


def log_cuda_max_memory(stage: str | None = None) -> None:
    """Log the peak of CUDA memory that was in use and reserved, like `log_cuda_memory`."""
    _log("most CUDA memory", stage, torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)


def log_model_params(model: nn.Module) -> None:
    """Log the number of parameters of a model, of trained ones, and their bytes. Shared parameters count once."""
    weights = list(model.parameters())
    total = sum(weight.numel() for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    gib = sum(weight.nbytes for weight in weights) / GIB
    _logger.info(f"{type(model).__name__}: {total:,} parameters, {trained:,} of them trained, {gib:.3f} GiB")


def _log(what: str, stage: str | None, allocated: Callable[[], int], reserved: Callable[[], int]) -> None:
    what = what if stage is None else f"{what} at {stage}"
    if torch.cuda.is_available():
        _logger.info(f"{what}: {allocated() / GIB:.3f} GiB in use, {reserved() / GIB:.3f} GiB reserved")
    else:
        _logger.info(f"{what}: there is no CUDA device")
