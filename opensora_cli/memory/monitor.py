"""Logging how much memory is in use, under the names that the Open-Sora community knows."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

GIB = 2**30
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProfiledPhase:
    """What one phase of a program took."""

    name: str
    seconds: float
    """Of the wall clock, once the device had finished."""
    allocated_gib: float | None
    """In use on the device at its end; None without CUDA."""
    peak_allocated_gib: float | None
    """The most during it."""
    peak_reserved_gib: float | None
    """The most that torch's allocator reserved on the GPU meanwhile."""


class AccelerationProfiler:
    """Measures the time and the CUDA memory of named phases, one after the other; without CUDA only the time.

    `device` None is the current CUDA device where there is one.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._cuda = chosen if chosen.type == "cuda" else None
        self.phases: list[ProfiledPhase] = []

    @contextmanager
    def profile(self, name: str) -> Iterator[None]:
        """Measure the block as the phase `name`; also when it fails. Phases do not nest: each resets the peak."""
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


def log_cuda_memory(stage: str | None = None) -> None:
    """Log how much CUDA memory is in use and reserved now in a stage; without CUDA, that there is none."""
    _log("CUDA memory", stage, torch.cuda.memory_allocated, torch.cuda.memory_reserved)


def log_cuda_max_memory(stage: str | None = None) -> None:
    """Log the most CUDA memory that was in use and reserved, as `log_cuda_memory`."""
    _log("most CUDA memory", stage, torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)


def log_model_params(model: nn.Module) -> None:
    """Log how many parameters a model has, how many of them are trained, and their bytes; shared ones count once."""
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
