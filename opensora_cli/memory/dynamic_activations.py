"""Offloading activations only where device memory runs short."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opensora_cli.core.private_memory import read_private_memory
from opensora_cli.memory.activations import ActivationManager

_SAMPLES = 10_000

MemoryReading = Callable[[torch.device], tuple[int, int]]
"""A device to its bytes in use, and its bytes in all."""


def used_and_total(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a device that are in use, and all of its bytes; for a CPU what this process can have.

    What torch's allocator holds in reserve on CUDA is not in use: the next tensors come out of it.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return total - free - reserve, total
    memory = read_private_memory()
    return memory.total_bytes - memory.free_bytes, memory.total_bytes


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The memory at the moment in which one tensor was to be saved."""

    used_bytes: int
    """Of the device."""
    buffer_bytes: int
    """Of the buffer, in use."""
    offloaded: bool
    """What was decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """What a `DynamicActivationManager` has seen."""

    peak_bytes: int
    """The most device memory in use, in any sample."""
    total_bytes: int
    """The device's memory; 0 before the first sample."""
    history: tuple[MemorySample, ...]
    """The last 10,000 samples, oldest first."""
    buffer_bytes: int
    """Size of the buffer."""
    buffer_used_bytes: int
    buffer_peak_bytes: int
    offloaded: int
    """Tensors that went to the buffer, since the beginning."""
    stayed: int
    """Tensors that there was room for on the device."""


class DynamicActivationManager(ActivationManager):
    """Offloads a tensor only if more than a share of the device's memory is in use when it is saved.

    A tensor that stays needs no copy in backward either. The buffer must still be large enough for the worst case. The
    share `threshold` is 0 to 1; 0 offloads everything, 1 nothing, and another raises ValueError.
    """

    def __init__(self, threshold: float = 0.8, *, read_memory: MemoryReading = used_and_total) -> None:
        super().__init__()
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold={threshold} must be a share of the device's memory: 0 to 1")
        self.threshold = threshold
        self._read_memory = read_memory
        self._history: deque[MemorySample] = deque(maxlen=_SAMPLES)
        self._peak_bytes = self._total_bytes = 0
        self._offloaded = self._stayed = 0

    def memory_profiling(self) -> MemoryProfile:
        """Return peak and history of the device's memory, and the use of the buffer."""
        return MemoryProfile(
            peak_bytes=self._peak_bytes,
            total_bytes=self._total_bytes,
            history=tuple(self._history),
            buffer_bytes=self.buffer_bytes,
            buffer_used_bytes=self.used_bytes,
            buffer_peak_bytes=self.peak_bytes,
            offloaded=self._offloaded,
            stayed=self._stayed,
        )

    def _stays(self, x: Tensor) -> bool:
        if super()._stays(x):
            return True
        used, total = self._read_memory(x.device)
        offloaded = used > self.threshold * total
        self._history.append(MemorySample(used, self.used_bytes, offloaded))
        self._peak_bytes, self._total_bytes = max(self._peak_bytes, used), total
        self._offloaded += offloaded
        self._stayed += not offloaded
        return not offloaded
