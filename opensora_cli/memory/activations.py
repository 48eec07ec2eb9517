"""Offloading of activations to host memory between forward and backward.

The inputs of checkpointed blocks are offloaded (see `checkpointing`). With checkpointing, they are nearly all memory
between forward and backward. Backward reads each once and runs the blocks in reverse order. So the buffer is a stack,
and the inputs of the next block are prefetched while a block computes. Parameters and their views are never
offloaded: every step needs them again, and freeing a saved copy would not free the parameter.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from opensora_cli.core.device import current_stream, has_streams, is_gpu
from opensora_cli.memory.activation_buffer import Copies, HostStack, PlainCopies, Slot, StreamCopies


class OffloadedActivation:
    """Handle of an offloaded tensor for `ActivationManager.onload`."""

    def __init__(self, entry: "_Entry") -> None:
        self._entry: _Entry | None = entry

    @property
    def host(self) -> Tensor | None:
        """Copy in the buffer, which a GPU may still be writing; None if the tensor stayed on its device."""
        return None if self._entry is None or self._entry._slot is None else self._entry._host


class ActivationManager:
    """Manager that offloads activations to a stack in host memory, which is allocated once.

    `offloading` is for training: it offloads tensors that autograd saves inside its block. `offload` and `onload` are
    for callers that track tensors themselves. A tensor that is saved several times, such as the modulation vector or
    the rotary tables of all blocks, is copied once in each direction. It is identified by storage, offset, shape,
    strides, dtype and version.

    On a GPU, copies run on separate streams: to the host as soon as a tensor is saved, and back one block ahead. Like
    any tensor that autograd saves, an offloaded tensor must not be changed in place. Space is released when the graph
    of a tensor is freed. A failed pass therefore leaves nothing behind once its exception is dropped; `reset` releases
    the space immediately. One manager serves one process and one thread of forward passes.
    """

    def __init__(self) -> None:
        self.outside_bytes = 0
        """Bytes of saved tensors of other dtypes, which stay on their device now."""
        self.copied_to_host = 0
        """Total bytes copied to the host."""
        self.copied_to_device = 0
        """Total bytes copied to the device."""
        self._stack: HostStack | None = None
        self._entries: weakref.WeakValueDictionary[_Identity, _Entry] = weakref.WeakValueDictionary()
        # Tensors that each block saved, in the order of forward.
        self._regions: list[list[weakref.ref[_Entry]]] = [[]]
        self._handles: list[OffloadedActivation] = []
        self._copies: dict[torch.device, Copies] = {}

    def __deepcopy__(self, memo: object) -> Self:
        # The copy of a model, for example for an average of its weights, uses the same buffer.
        return self

    def setup_buffer(self, numel: int, dtype: torch.dtype, *, device: str = "cpu") -> None:
        """Allocate a buffer of `numel` elements instead of an earlier one. `peak_bytes` shows how much a run needed.

        On the device `meta` the buffer has no memory, and a model on meta shows its needs.
        Raises ValueError if the buffer would be empty, and RuntimeError if the earlier buffer is in use, or there is
        too little memory.
        """
        if numel <= 0:
            raise ValueError(f"numel={numel} must be over 0")
        if self.used_bytes:
            raise RuntimeError(
                f"the activation buffer holds {self.used_bytes} bytes: call setup_buffer after backward, or reset() "
                "before it"
            )
        self._stack = HostStack(numel, dtype, device=device)

    def offload(self, x: Tensor) -> OffloadedActivation:
        """Copy a tensor to the buffer. Its own memory is freed when the caller drops it.
        Raises RuntimeError if there is no buffer or it is full, and ValueError if x has another dtype.
        """
        stack = self._require_stack()
        if x.dtype != stack.elements.dtype:
            raise ValueError(
                f"x has dtype {x.dtype}, and the activation buffer {stack.elements.dtype}: "
                "cast it, or call setup_buffer with its dtype"
            )
        handle = OffloadedActivation(self._entry(x))
        self._handles.append(handle)
        return handle

    def onload(self, x: OffloadedActivation) -> Tensor:
        """Return a tensor on its original device, without its graph, and release its space.

        Raises RuntimeError if it is not the last one in the buffer, or is no longer offloaded.
        """
        if x._entry is None:
            raise RuntimeError("this activation was onloaded before, or dropped by reset(): offload it again")
        if self._handles[-1] is not x:
            raise RuntimeError(
                "wrong order: the buffer is a stack, so onload first what was offloaded last "
                f"({len(self._handles) - 1 - self._handles.index(x)} came after this one)"
            )
        tensor = x._entry.fetch()
        self._handles.pop()
        x._entry = None
        return tensor

    @contextmanager
    def offloading(self) -> Iterator[None]:
        """Offload tensors that autograd saves inside this context, which is one step of the prefetch in backward.

        Tensors of another dtype stay on their device and count in `outside_bytes`; parameters stay and do not count.
        Raises RuntimeError if there is no buffer or it is full.
        """
        self._require_stack()
        while self._regions and not any(entry() for entry in self._regions[-1]):
            self._regions.pop()
        self._regions.append([])
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def reset(self) -> None:
        """Release all space. Fetching an earlier activation then raises an error."""
        if self._stack is not None:
            self._stack.clear()
        for handle in self._handles:
            handle._entry = None
        self._handles.clear()
        self._entries.clear()
        self._regions = [[]]

    def buffers(self) -> list[Tensor]:
        """Return the host memory of the buffer, if any."""
        return [] if self._stack is None else [self._stack.elements]

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._stack.elements.numel() * self._stack.elements.element_size() if self._stack else 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffer that are in use."""
        return self._stack.used * self._stack.elements.element_size() if self._stack else 0

    @property
    def peak_bytes(self) -> int:
        """Peak number of bytes of this buffer in use."""
        return self._stack.peak * self._stack.elements.element_size() if self._stack else 0

    def _stays(self, x: Tensor) -> bool:
        """Return whether a saved tensor stays on its device."""
        return x.dtype != self._require_stack().elements.dtype

    def _pack(self, x: Tensor) -> "Tensor | _Saved":
        # A wrapper such as DTensor has no single storage to copy.
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) or hasattr(x, "__tensor_flatten__"):
            return x
        entry = self._entry(x)
        self._regions[-1].append(weakref.ref(entry))
        return _Saved(entry, len(self._regions) - 1)

    def _unpack(self, saved: "Tensor | _Saved") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        tensor = saved.entry.fetch()
        # Fetch the other tensors of this block, then those of the next one in backward.
        for region in reversed(self._regions[max(saved.region - 1, 0) : saved.region + 1]):
            for entry in filter(None, (reference() for reference in region)):
                entry.start()
        return tensor

    @torch.no_grad()
    def _entry(self, x: Tensor) -> "_Entry":
        storage = x.untyped_storage()
        key = _Identity(storage._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)
        entry = self._entries.get(key)
        # Another storage may have the address of a freed one.
        if entry is None or entry.storage() is not storage:
            stack = self._require_stack()
            entry = _Entry(self, x.detach(), stack=None if self._stays(x) else stack)
            self._entries[key] = entry
        return entry

    def _copies_of(self, device: torch.device) -> Copies:
        if device not in self._copies:
            self._copies[device] = StreamCopies(device) if has_streams(device) else PlainCopies()
        return self._copies[device]

    def _require_stack(self) -> HostStack:
        if self._stack is None:
            raise RuntimeError("the activation manager has no buffer: call setup_buffer(numel, dtype) first")
        return self._stack


class _Identity(NamedTuple):
    """Key that is equal for two saved tensors if they are the same."""

    storage: int
    offset: int | torch.SymInt
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    version: int


class _Saved(NamedTuple):
    """Object that autograd holds instead of a saved tensor."""

    entry: "_Entry"
    region: int


class _Entry:
    """Saved tensor, offloaded or on its device. Its space is released with it."""

    def __init__(self, manager: ActivationManager, source: Tensor, *, stack: HostStack | None) -> None:
        self._manager = manager
        self._stack = stack
        self._slot: Slot | None = None
        self._tensor: Tensor | None = None
        self._ready: torch.Event | None = None
        self._num_bytes = source.numel() * source.element_size()
        self.storage = weakref.ref(source.untyped_storage())
        if stack is None:
            self._tensor = source
            manager.outside_bytes += self._num_bytes
            return
        if is_gpu(source.device):
            stack.lock_pages(source.device)
        self._slot = stack.push(source.numel())
        self._copies = manager._copies_of(source.device)
        self._device = source.device
        self._host = stack.view(self._slot, source.shape, _strides_without_gaps(source))
        self._copies.to_host(source, self._host)
        manager.copied_to_host += self._num_bytes

    @torch.no_grad()
    def start(self) -> None:
        """Start fetching the tensor, unless that has started."""
        if self._tensor is None and self._slot is not None and self._slot.live:
            host = self._host
            self._tensor = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self._device)
            self._ready = self._copies.to_device(host, self._tensor)
            self._manager.copied_to_device += self._num_bytes

    def fetch(self) -> Tensor:
        """Return the tensor on its device, for use on the current stream. Raises RuntimeError if it was dropped."""
        self.start()
        if self._tensor is None or (self._slot is not None and not self._slot.live):
            raise RuntimeError("this activation was dropped by reset(): run the forward pass again")
        if self._ready is not None:
            current_stream(self._tensor.device).wait_event(self._ready)
        return self._tensor

    def __del__(self) -> None:
        if self._slot is not None and self._stack is not None:
            self._stack.release(self._slot)
        elif self._stack is None:
            self._manager.outside_bytes -= self._num_bytes


def _strides_without_gaps(x: Tensor) -> tuple[int, ...]:
    """Return the strides of `x` without gaps, in the order of its dimensions in memory.

    With other strides, kernels may sum in another order, and gradients differ in their last bits.
    """
    strides = [0] * x.ndim
    step = 1
    for dim in sorted(reversed(range(x.ndim)), key=x.stride):
        strides[dim] = step
        step *= x.shape[dim]
    return tuple(strides)
