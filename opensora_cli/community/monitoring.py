"""Functions for monitoring: memory, sizes, times."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opensora_cli.core.device import (
    GIB,
    allocated_bytes,
    current_device,
    current_gpu,
    has_gpu,
    peak_allocated_bytes,
    peak_reserved_bytes,
    reserved_bytes,
    timed,
)
from opensora_cli.engine.train.metrics import require_tensorboard
from opensora_cli.memory.monitor import Spread, peak_bytes

_logger = logging.getLogger(__name__)


def get_model_numel(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters of a model, and the number of trained ones."""
    counts = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    return sum(count for count, _ in counts), sum(count for count, trained in counts if trained)


def format_numel_str(numel: int) -> str:
    """Return a number in powers of 1024: `10.24 B` for eleven billion."""
    for power, letter in ((3, "B"), (2, "M"), (1, "K")):
        if numel >= 1024**power:
            return f"{numel / 1024**power:.2f} {letter}"
    return str(numel)


def create_tensorboard_writer(exp_dir: str | Path) -> Any:
    """Return a `SummaryWriter` for `exp_dir/tensorboard`. Raises HardwareError if TensorBoard is not installed."""
    return require_tensorboard()(str(Path(exp_dir, "tensorboard")))


class AccelerationProfiler:
    """Profiler of calls on the first GPU if there is one."""

    def __init__(self) -> None:
        self._device = current_device()
        kinds = ("timing_breakdown", "memory_breakdown", "communication_breakdown")
        self._report: dict[str, dict[str, float]] = {kind: {} for kind in kinds}

    def profile_checkpoint(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and record its seconds and peak bytes under `checkpoint`. On a CPU tensors are counted."""
        found: list[tuple[Any, float]] = []
        peak = peak_bytes(lambda: found.append(self._timed(func, *args, **kwargs)), device=self._device)
        self._report["memory_breakdown"]["checkpoint"] = peak
        self._report["timing_breakdown"]["checkpoint"] = found[0][1]
        return found[0][0]

    def profile_communication(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and record its seconds under its name."""
        result, self._report["communication_breakdown"][func.__name__] = self._timed(func, *args, **kwargs)
        return result

    def _timed(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, float]:
        results: list[Any] = []
        seconds = timed(lambda: results.append(func(*args, **kwargs)), self._device)
        return results[0], seconds

    def generate_report(self) -> dict[str, dict[str, float]]:
        """Return `timing_breakdown` and `communication_breakdown` in seconds, `memory_breakdown` in bytes."""
        return {name: dict(figures) for name, figures in self._report.items()}


def monitor_gpu_memory() -> dict[str, float] | None:
    """Print and return the `allocated`, `reserved` and `max_allocated` GiB; None without a GPU."""
    if not has_gpu():
        print("GPU memory: there is no CUDA device")
        return None
    counts = {"allocated": allocated_bytes, "reserved": reserved_bytes, "max_allocated": peak_allocated_bytes}
    figures = {name: count(current_gpu()) / GIB for name, count in counts.items()}
    print("GPU memory: " + ", ".join(f"{name} {gib:.2f} GiB" for name, gib in figures.items()))
    return figures


def log_cuda_memory(stage: str | None = None) -> None:
    """Log the CUDA memory that is in use and reserved at a stage."""
    _log_memory("CUDA memory", stage, allocated_bytes, reserved_bytes)


def log_cuda_max_memory(stage: str | None = None) -> None:
    """Log the peak of CUDA memory that was in use and reserved at a stage."""
    _log_memory("most CUDA memory", stage, peak_allocated_bytes, peak_reserved_bytes)


def _log_memory(what: str, stage: str | None, *counts: Callable[[torch.device], int]) -> None:
    text = "there is no CUDA device"
    if has_gpu():
        text = "{:.3f} GiB in use, {:.3f} GiB reserved".format(*(count(current_gpu()) / GIB for count in counts))
    _logger.info(f"{what}: {text}" if stage is None else f"{what} at {stage}: {text}")


def log_model_params(model: nn.Module) -> None:
    """Log the number of parameters of a model, of trained ones, and their bytes. Shared parameters count once."""
    total, trained = get_model_numel(model)
    gib = sum(weight.nbytes for weight in model.parameters()) / GIB
    _logger.info(f"{type(model).__name__}: {total:,} parameters, {trained:,} of them trained, {gib:.3f} GiB")


@torch.no_grad()
def profile_model_performance(model: nn.Module, input_data: Any, num_runs: int = 10) -> tuple[float, float]:
    """Return mean and standard deviation of the seconds of `model(input_data)`, after a warm-up run."""
    seconds = [timed(lambda: model(input_data), current_device()) for _ in range(num_runs + 1)]
    spread = Spread.of(seconds[1:])
    return spread.mean_s, spread.deviation_s
