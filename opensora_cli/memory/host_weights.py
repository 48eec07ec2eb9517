"""Weights of streamed blocks in host memory, their copies to a device, and the bytes that they take there."""

import mmap
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, cycle
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from opensora_cli.core.device import is_gpu, lock_pages, unlock_pages
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.memory.host_memory import SideStream, page_aligned

HostSource = Literal["pinned", "mapped"]
"""Source of the copies. pinned: one page-locked copy of the weights; mapped: the original weights, as in a file."""

T = TypeVar("T")

STAGING_BYTES = 32 * 2**20
"""Size of each of the two staging buffers for mapped weights: a copy takes much longer than its launch."""
ALIGNMENT = 512
"""Alignment of weights in bytes. It is that of torch's CUDA tensors, so that the same kernels are chosen."""
SLOTS = 2
"""Number of slots: one for the block that computes, and one for the next."""


def aligned(nbytes: int) -> int:
    """Return the aligned number of bytes of a weight in a run."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def slot_bytes(block: nn.Module) -> int:
    """Return the number of bytes for a block's weights in one run of memory. The block may be on the meta device."""
    return sum(aligned(weight.nbytes) for weight in block.parameters() if weight.device.type in ("cpu", "meta"))


def streaming_bytes(block_bytes: Sequence[int], *, resident: int) -> int:
    """Return the bytes that `stream_blocks` holds on the device for weights, from the blocks' `slot_bytes` in order."""
    kept = kept_blocks(len(block_bytes), resident=resident)
    streamed = [size for index, size in enumerate(block_bytes) if index not in kept]
    return sum(block_bytes[index] for index in kept) + min(resident, SLOTS) * max(streamed, default=0)


def kept_blocks(count: int, *, resident: int) -> list[int]:
    """Return the indexes of the blocks, among `count`, that `stream_blocks` keeps on the device.

    Raises ValueError if `resident` is not positive.
    """
    if resident < 1:
        raise ValueError(f"resident={resident} is not positive: a block must be on the device to compute")
    if resident >= count:
        return list(range(count))
    kept = max(0, resident - SLOTS)
    return [(2 * index + 1) * count // (2 * kept) for index in range(kept)]


class BlockWeights:
    """Parameters of a block that are on the CPU, each once, and their offsets in one run of bytes.

    Parameters on another device are skipped: they are shared with modules outside of the blocks. So are those of
    modules in `without`, and with `frozen` those that require gradients. Floating-point parameters have `dtype` in the
    run; None means their own.
    """

    def __init__(
        self,
        block: nn.Module,
        dtype: torch.dtype | None = None,
        *,
        frozen: bool = False,
        without: Container[nn.Module] = (),
    ) -> None:
        self._users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in (module for module in block.modules() if module not in without):
            for name, weight in module._parameters.items():
                if weight is None or weight.device.type not in ("cpu", "meta") or (frozen and weight.requires_grad):
                    continue
                self._users.setdefault(weight, []).append((module, name))
        self.casts = dtype is not None
        self._dtypes = [dtype if dtype and weight.is_floating_point() else weight.dtype for weight in self._users]
        self._sizes = [weight.numel() * kept.itemsize for weight, kept in zip(self._users, self._dtypes, strict=True)]
        *self._offsets, self.nbytes = accumulate(map(aligned, self._sizes), initial=0)

    @property
    def host(self) -> list[nn.Parameter]:
        """Parameters on the CPU, in the order of the run."""
        return list(self._users)

    def views(self, run: Tensor) -> list[Tensor]:
        """Return the tensors in a run of (nbytes or more,) uint8, on any device, with the shapes of the parameters."""
        return [
            run[offset : offset + size].view(dtype).view(weight.shape)
            for offset, size, dtype, weight in zip(self._offsets, self._sizes, self._dtypes, self._users, strict=True)
        ]

    def swap_in(self, tensors: Sequence[Tensor]) -> None:
        """Replace the block's parameters by `tensors`, in the order of `host`, until `swap_out`."""
        for users, tensor in zip(self._users.values(), tensors, strict=True):
            _give(nn.Parameter(tensor, requires_grad=False), users)

    def swap_out(self) -> None:
        for weight, users in self._users.items():
            _give(weight, users)

    @torch.no_grad()
    def move_to(self, run: Tensor, shared: dict[nn.Parameter, nn.Parameter]) -> None:
        """Copy the parameters to a run of (nbytes or more,) uint8 on the CPU. The block keeps these copies.

        `shared` maps parameters of several blocks to their replacements, or to themselves before the first has moved.
        """
        users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for (weight, own), view in zip(self._users.items(), self.views(run), strict=True):
            view.copy_(weight)
            new = shared.get(weight, weight)
            if new is weight:
                new = nn.Parameter(view, requires_grad=weight.requires_grad)
            if weight in shared:
                shared[weight] = new
            users[new] = own
            _give(new, own)
        self._users = users


def _give(weight: nn.Parameter, users: Sequence[tuple[nn.Module, str]]) -> None:
    for module, name in users:
        module._parameters[name] = weight


@contextmanager
def open_host_weights(
    source: HostSource, blocks: Sequence[BlockWeights], *, device: torch.device, side: SideStream
) -> Iterator["HostWeights"]:
    """Prepare weights for copies to a device, and yield them.

    `pinned` moves the weights, block by block, to page-locked memory, where they stay after it is unlocked; no memory
    is locked for a CPU. At the end of the context, threads are stopped, copies are done, and memory is unlocked. Raises
    HardwareError if the memory cannot be locked.
    """
    with _LockedMemory(device) as memory:
        try:
            if source == "pinned":
                yield _PinnedWeights(blocks, memory)
            else:
                with _MappedWeights(blocks, memory, side) as mapped:
                    yield mapped
        finally:
            side.synchronize()


class _LockedMemory:
    """Host memory, page-locked if the device that copies from it is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._locked: list[Tensor] = []
        self.nbytes = 0

    def allocate(self, nbytes: int) -> Tensor:
        """Return (nbytes,) uint8 that begins at a page."""
        memory = page_aligned(nbytes)
        if is_gpu(self._device) and nbytes:
            if not lock_pages(memory, self._device):
                raise HardwareError(
                    f"{nbytes} bytes of memory cannot be page-locked",
                    hint="raise the limit of locked memory (ulimit -l), or use --set memory.host_weights=mapped",
                )
            self._locked.append(memory)
        self.nbytes += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return memory

    def __enter__(self) -> "_LockedMemory":
        return self

    def __exit__(self, *exception: object) -> None:
        while self._locked:
            unlock_pages(self._locked.pop(), self._device)


class _PinnedWeights:
    """Weights in locked memory. The device fetches a block in one asynchronous copy, on its current stream."""

    def __init__(self, blocks: Sequence[BlockWeights], memory: _LockedMemory) -> None:
        counts = Counter(weight for block in blocks for weight in block.host)
        shared: dict[nn.Parameter, nn.Parameter] = {weight: weight for weight, count in counts.items() if count > 1}
        # Drop these references, so that a moved block is freed before the next block moves.
        counts.clear()
        self._runs = []
        with torch.inference_mode(False):
            for block in blocks:
                self._runs.append(memory.allocate(block.nbytes))
                block.move_to(self._runs[-1], shared)
        self.nbytes = memory.nbytes

    def start(self, copy: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(copy())
        return done

    def copy_to(self, index: int, slot: Tensor) -> None:
        run = self._runs[index]
        slot[: run.nbytes].copy_(run, non_blocking=True)


class _MappedWeights:
    """Weights anywhere in host memory. A thread copies them piece by piece to two locked buffers in turn. The device
    fetches one buffer while the thread reads the next piece into the other. On the CPU, the thread copies weights that
    are cast directly to their slots.
    """

    def __init__(self, blocks: Sequence[BlockWeights], memory: _LockedMemory, side: SideStream) -> None:
        self._blocks = blocks
        self._side = side
        staged = (weight.nbytes for block in blocks if not block.casts for weight in block.host)
        largest = max(staged, default=0)
        self._buffers = [memory.allocate(min(largest, STAGING_BYTES)) for _ in range(2)]
        self._fetched: list[torch.Event | None] = [None, None]
        self._turns = cycle(range(2))
        self.nbytes = memory.nbytes
        self._stopped = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def start(self, copy: Callable[[], T]) -> Future[T]:
        return self._thread.submit(copy)

    def copy_to(self, index: int, slot: Tensor) -> None:
        block = self._blocks[index]
        for weight, target in zip(block.host, block.views(slot), strict=True):
            if self._stopped.is_set():
                return
            if block.casts:
                target.copy_(weight)
                continue
            source, target = weight.reshape(-1), target.view(-1)
            step = self._buffers[0].nbytes // weight.dtype.itemsize
            for start in range(0, source.numel(), step):
                if self._stopped.is_set():
                    return
                self._copy_piece(source[start : start + step], target[start : start + step])

    def _copy_piece(self, piece: Tensor, target: Tensor) -> None:
        turn = next(self._turns)
        fetched = self._fetched[turn]
        if fetched is not None:
            fetched.synchronize()
        staged = self._buffers[turn][: piece.nbytes].view(piece.dtype)
        staged.copy_(piece)
        target.copy_(staged, non_blocking=True)
        self._fetched[turn] = self._side.mark()

    def __enter__(self) -> "_MappedWeights":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.shutdown(cancel_futures=True)


HostWeights = _PinnedWeights | _MappedWeights
"""Weights of blocks in host memory: `start` runs copies in the order of the calls, and each calls `copy_to`."""
