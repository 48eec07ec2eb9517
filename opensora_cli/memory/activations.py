"""Offloading of activations to host memory between forward and backward, with torch's hooks for saved tensors."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from opensora_cli.core.device import is_gpu


class HostActivations:
    """Host copies of the tensors that autograd saves inside `offloading`.

    Around checkpointed blocks (see `checkpointing`), these are the inputs of the blocks. A tensor that is saved several
    times, such as the rotary tables of all blocks, is copied once in each direction. Parameters and their views stay on
    their device: every step needs them again. A saved tensor must not be changed in place. A copy is freed with the
    graph that needs it. `on_copy` is called with each copy.
    """

    def __init__(self, *, on_copy: Callable[[Tensor], object] = lambda copy: None) -> None:
        self._on_copy = on_copy
        self._saved: weakref.WeakValueDictionary[object, _Saved] = weakref.WeakValueDictionary()

    def offloading(self) -> saved_tensors_hooks:
        """Return a context that offloads the tensors that autograd saves inside it."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @torch.no_grad()
    def _pack(self, x: Tensor) -> "Tensor | _Saved":
        # A wrapper such as DTensor has no single storage to copy.
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) or hasattr(x, "__tensor_flatten__"):
            return x
        storage = x.untyped_storage()
        key = (storage._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)
        saved = self._saved.get(key)
        # Another storage may have the address of a freed one.
        if saved is None or saved.storage() is not storage:
            saved = self._saved[key] = _Saved(x)
            self._on_copy(saved.copy)
        return saved

    @torch.no_grad()
    def _unpack(self, saved: "Tensor | _Saved") -> Tensor:
        return saved if isinstance(saved, Tensor) else saved.fetch()


class _Saved:
    """Saved tensor, on the host until backward needs it."""

    def __init__(self, x: Tensor) -> None:
        self.storage = weakref.ref(x.untyped_storage())
        self._device = x.device
        # Copies from and to locked pages run in the order of the device's own work, without the host.
        self.copy = torch.empty_like(x, device="cpu", pin_memory=is_gpu(x.device)).copy_(x, non_blocking=True)
        self._fetched: Tensor | None = None

    def fetch(self) -> Tensor:
        """Return the tensor on its device."""
        if self._fetched is None:
            self._fetched = torch.empty_like(self.copy, device=self._device).copy_(self.copy, non_blocking=True)
        return self._fetched
