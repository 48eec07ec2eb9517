"""The storages of fake tensors: numbered, with addresses that are nowhere, and pinned or not."""

import weakref
from bisect import bisect_right
from dataclasses import dataclass

import torch
from fake_cuda.log import Allocated, Freed, Lent, Log, Operand, Unlocked
from torch import Tensor

_FIRST_ADDRESS = 2**46
_PAGE = 4096
_BLOCK = 512
"""Bytes, to a multiple of which the allocator of CUDA rounds."""


@dataclass(slots=True)
class _Known:
    number: int
    num_bytes: int
    device: torch.device
    alive: "weakref.ref[torch.UntypedStorage]"
    is_pinned: bool = False
    address: int | None = None


class Storages:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._known: dict[int, _Known] = {}
        self._count = 0
        self._next_address = _FIRST_ADDRESS
        self._locked: dict[int, int] = {}
        """Address of locked memory -> one behind its last byte."""
        self._is_over = False

    def end(self) -> None:
        """Log nothing any more: what is freed from now on is what the rehearsal leaves."""
        self._is_over = True

    def see(self, tensor: Tensor, *, queue: str | None = None, pinned: bool = False) -> _Known:
        """Return what is known of a tensor's storage; a new one is logged."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return self._known[key]
        device, size = tensor.device, storage.nbytes()
        if device.type == "cuda":
            size = -(-size // _BLOCK) * _BLOCK

        def forget(_: object) -> None:
            gone = self._known.pop(key)
            if not self._is_over:
                self._log.add(Freed(self._log.thread, "", gone.number, gone.device, gone.num_bytes))

        known = _Known(self._count, size, device, weakref.ref(storage, forget), is_pinned=pinned)
        self._known[key] = known
        self._count += 1
        self._log.asked(Allocated, known.number, device, size, queue)
        return known

    def resized(self, storage: torch.UntypedStorage, *, queue: str) -> None:
        """Log that a storage was emptied or filled, as FSDP2 does: what it holds from then on has another number."""
        known = self._known.get(storage._cdata)
        if known is None:
            return
        if known.num_bytes:
            self._log.asked(Freed, known.number, known.device, known.num_bytes)
        known.number, known.num_bytes = self._count, -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._count += 1
        if known.num_bytes:
            self._log.asked(Allocated, known.number, known.device, known.num_bytes, queue)

    def lend(self, tensor: Tensor, queue: str) -> None:
        self._log.asked(Lent, self.see(tensor).number, queue)

    def operand(self, tensor: Tensor, *, queue: str | None = None) -> Operand:
        known = self.see(tensor, queue=queue)
        size, first = tensor.element_size(), tensor.storage_offset()
        last = first
        if tensor.numel():
            last += 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
        pinned = known.is_pinned or (known.address is not None and self._is_locked(known.address, first, last, size))
        return Operand(
            known.number, tensor.device, tensor.dtype, tuple(tensor.shape), first * size, last * size, pinned
        )

    def address(self, tensor: Tensor) -> int:
        known = self.see(tensor)
        if known.address is None:
            # As an allocator would, at no multiple of a page.
            known.address = self._next_address + 64
            self._next_address += -(-known.num_bytes // _PAGE) * _PAGE + _PAGE
        return known.address + tensor.storage_offset() * tensor.element_size()

    def lock(self, address: int, num_bytes: int) -> bool:
        if any(start < address + num_bytes and address < stop for start, stop in self._locked.items()):
            return False
        self._locked[address] = address + num_bytes
        return True

    def unlock(self, address: int) -> bool:
        stop = self._locked.pop(address, None)
        if stop is None:
            return False
        for known in self._known.values():
            if known.address is not None and address < known.address + known.num_bytes and known.address < stop:
                self._log.asked(Unlocked, known.number)
        return True

    def _is_locked(self, address: int, first: int, last: int, size: int) -> bool:
        starts = sorted(self._locked)
        index = bisect_right(starts, address + first * size) - 1
        return index >= 0 and address + last * size <= self._locked[starts[index]]
