"""Choice between measuring and predicting, and memory and time of a call."""

from collections.abc import Callable
from typing import TypeVar

import torch

from opensora_cli.core.device import allocated_bytes, has_peaks, peak_allocated_bytes, reset_peaks, timed
from opensora_cli.core.private_memory import read_private_memory
from opensora_cli.engine.components.hardware import Hardware, is_out_of_memory
from opensora_cli.engine.mem_profile.report import mib
from opensora_cli.memory.counting import TensorBytes

MOST_ON_A_CPU = 4 * 2**30
"""Limit in bytes; with much more, a CPU would compute for hours."""

OUT_OF_MEMORY = "there was not enough memory after all"

T = TypeVar("T")


def why_not_measured(needed: int, hardware: Hardware, *, weights: int = 0) -> str | None:
    """Return the reason not to run a job that needs `needed` bytes of the device; None means to run it.

    `weights` are the bytes of all weights that the host holds for streaming; 0 means no streaming.
    """
    if not hardware.is_here or not hardware.memory_is_known:
        return f"{hardware.device_name} is not in this machine"
    if needed > hardware.free_bytes:
        return f"it needs {mib(needed)}, and {mib(hardware.free_bytes)} are free"
    if hardware.device.type == "cpu":
        if max(needed, weights) > MOST_ON_A_CPU:
            return f"a CPU would take too long: only up to {mib(MOST_ON_A_CPU)} are run without a GPU"
        return None
    free = read_private_memory().free_bytes
    if weights > free:
        return f"random weights in the host's memory need {mib(weights)}, and {mib(free)} are free"
    return None


def unless_out_of_memory(run: Callable[[], T]) -> T | None:
    """Return the result of `run`, or None if memory was not enough.

    The memory of `run` can be released afterwards, because the exception is gone with the traceback that held it.
    """
    try:
        return run()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def peak_bytes(run: Callable[[], object], *, device: torch.device, limit: int | None = None) -> int:
    """Return the peak of memory that `run` adds: of the allocator on CUDA, and of counted tensors on a CPU.

    Raises MemoryError if more than `limit` bytes are counted on a CPU.
    """
    if has_peaks(device):
        before = allocated_bytes(device)
        reset_peaks(device)
        timed(run, device)
        return peak_allocated_bytes(device) - before
    with TensorBytes(limit=limit) as counter:
        run()
    return counter.peak_bytes


def memory_and_time(run: Callable[[], object], *, device: torch.device, repeats: int) -> tuple[int, float]:
    """Return `peak_bytes` of `run`, which also warms up, and its shortest time in seconds."""
    return peak_bytes(run, device=device), min(timed(run, device) for _ in range(repeats))
