"""Host buffer of offloaded activations, and the copies to and from it."""

import weakref
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from opensora_cli.core.device import current_stream, in_stream, new_stream
from opensora_cli.memory.host_memory import PageLock, page_aligned


@dataclass(eq=False, slots=True)
class Slot:
    """Part of a `HostStack`, in elements."""

    start: int
    stop: int
    live: bool = True
    """Whether the slot is still in use."""


class HostStack:
    """Stack of flat memory of one dtype; on `meta` it only counts.

    Slots are allocated at the top and may be released in any order. The top falls as soon as no slot there is live.
    Raises RuntimeError if there is too little memory.
    """

    def __init__(self, numel: int, dtype: torch.dtype, *, device: str) -> None:
        if device == "cpu":
            self.elements = page_aligned(numel * dtype.itemsize).view(dtype)
        else:
            self.elements = torch.empty(numel, dtype=dtype, device=device)
        self._lock: PageLock | None = None
        self.peak = 0
        """Peak number of elements in use."""
        self._slots: list[Slot] = []

    def lock_pages(self, device: torch.device) -> None:
        """Lock pages so that copies of a GPU overlap with computation. A second call has no effect.
        Raises HardwareError if the memory cannot be page-locked.
        """
        if self._lock is None:
            self._lock = PageLock(self.elements, device)
            # The system unlocks the pages at exit.
            weakref.finalize(self, self._lock.release).atexit = False

    @property
    def used(self) -> int:
        """Number of elements below the top."""
        return self._slots[-1].stop if self._slots else 0

    def push(self, numel: int) -> Slot:
        """Allocate a slot at the top. Raises RuntimeError if there is too little space."""
        start, size = self.used, self.elements.numel()
        if start + numel > size:
            raise RuntimeError(
                f"the activation buffer is full: it has room for {size} numbers, holds {start}, and {numel} more are "
                f"needed; call setup_buffer with at least {start + numel}, or reset() if a forward pass failed"
            )
        slot = Slot(start, start + numel)
        self._slots.append(slot)
        self.peak = max(self.peak, slot.stop)
        return slot

    def release(self, slot: Slot) -> None:
        """Release a slot. A second call has no effect."""
        slot.live = False
        while self._slots and not self._slots[-1].live:
            self._slots.pop()

    def clear(self) -> None:
        """Release all slots."""
        for slot in self._slots:
            slot.live = False
        self._slots = []

    def view(self, slot: Slot, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
        """Return a slot as a tensor."""
        return self.elements[slot.start : slot.stop].as_strided(shape, strides)


class Copies(Protocol):
    """Interface for copies of tensors from a device to the host, and back."""

    def to_host(self, source: Tensor, host: Tensor) -> None:
        """Start copying `source` after the current stream has computed it; its memory may be freed immediately."""

    def to_device(self, host: Tensor, target: Tensor) -> torch.Event | None:
        """Start copying to `target`, which was allocated on the current stream; return an event to await, or None."""


class PlainCopies:
    """Synchronous copies, which are done when the call returns."""

    def to_host(self, source: Tensor, host: Tensor) -> None:
        host.copy_(source)

    def to_device(self, host: Tensor, target: Tensor) -> None:
        target.copy_(host)


class StreamCopies:
    """Asynchronous copies on two separate streams, one for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._down = new_stream(device)
        self._up = new_stream(device)

    def to_host(self, source: Tensor, host: Tensor) -> None:
        """Copy after the current stream has computed `source`."""
        self._down.wait_stream(current_stream(source.device))
        # The previous contents of this part of host memory may still be in a copy to the device.
        self._down.wait_stream(self._up)
        with in_stream(self._down):
            host.copy_(source, non_blocking=True)
        # Prevents reuse of its memory before the copy is done.
        source.record_stream(self._down)

    def to_device(self, host: Tensor, target: Tensor) -> torch.Event:
        """Copy after the copies to the host, and after earlier use of the target's memory by the current stream."""
        self._up.wait_stream(current_stream(target.device))
        self._up.wait_stream(self._down)
        with in_stream(self._up):
            target.copy_(host, non_blocking=True)
        # After an error, it may be freed without a wait for the copy.
        target.record_stream(self._up)
        copied: torch.Event = self._up.record_event()
        return copied
