"""Host memory that is page-locked for asynchronous copies, or shared by all ranks of a machine.

torch's own page-locked memory has sizes of powers of two, up to twice the needs of weights or activations.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.core.device import device_module, has_streams, sleeping_event, synchronize
from opensora_cli.core.limits import read_private_memory
from opensora_cli.core.rank_messages import all_gather_json, broadcast_json

_SEGMENT_BYTES = 256 * 2**20
"""Size of one shared file, whose memory is freed when no tensor in it is in use."""
_ALIGNMENT = 512


def page_aligned(nbytes: int) -> Tensor:
    """Return (nbytes,) uint8 that begins at a page, and shares no page with other memory."""
    page = mmap.PAGESIZE
    with torch.inference_mode(False):
        memory = torch.empty(-(-nbytes // page) * page + page, dtype=torch.uint8)
        start = -memory.data_ptr() % page
        return memory[start : start + nbytes]


class SideStream:
    """Stream for copies. On a device without streams, where calls are synchronous, it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = device_module(device).Stream(device) if has_streams(device) else None

    def mark(self) -> torch.Event | None:
        """Return an event after all work queued on the current stream."""
        return None if self._stream is None else sleeping_event(self._stream.device)

    def wait(self, mark: torch.Event | None) -> None:
        """Make work that is queued from now on wait for a mark; the caller does not wait."""
        if self._stream is not None and mark is not None:
            device = self._stream.device
            device_module(device).current_stream(device).wait_event(mark)

    @contextmanager
    def after(self, mark: torch.Event | None) -> Iterator[None]:
        """Make this the current stream of the thread after a mark of another stream."""
        if self._stream is None:
            yield
            return
        with device_module(self._stream.device).stream(self._stream):
            self.wait(mark)
            yield

    def synchronize(self) -> None:
        """Wait until the device has done all queued work on all streams."""
        if self._stream is not None:
            synchronize(self._stream.device)


class SharedCopies:
    """Store of one common copy of tensors that every rank of a machine has computed, in the same order.

    The copies are in unnamed files, which a killed process leaves no trace of: in memory if it has room, or else in the
    temporary folder. If neither has room, or the ranks cannot see each other's files, each rank keeps its own tensors.
    Tensors may be read after the context has ended, and must not be written to.
    """

    def __init__(self, group: dist.ProcessGroup, *, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self._group = group
        self._segment_bytes = segment_bytes
        self._segment: Tensor | None = None
        self._used = 0
        self._has_room = dist.get_world_size(group) > 1

    def __enter__(self) -> "SharedCopies":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # After a failure, other ranks may never arrive.
        if error is None:
            dist.barrier(self._group)

    def hold(self, tensor: Tensor) -> Tensor:
        """Return the common copy of a tensor on the CPU, whose own memory is freed when the caller drops it."""
        size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._segment is None or self._used + size > self._segment.numel():
            self._begin_segment(max(size, self._segment_bytes))
        if self._segment is None or not tensor.nbytes:
            return tensor
        place = self._segment[self._used : self._used + tensor.nbytes]
        self._used += size
        if dist.get_rank(self._group) == 0:
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return place.view(tensor.dtype).view(tensor.shape)

    def _begin_segment(self, nbytes: int) -> None:
        self._segment, self._used = None, 0
        if not self._has_room:
            return
        file = _unnamed_file(nbytes) if dist.get_rank(self._group) == 0 else None
        with file or nullcontext():
            place = None if file is None else [f"/proc/{os.getpid()}/fd/{file.fileno()}", *_identity(file.fileno())]
            segment = _mapped(*broadcast_json(place, self._group) or (None, 0, 0), nbytes=nbytes)
            # Once all ranks have opened the file, it is deleted when the last rank ends in any way.
            self._has_room = all(all_gather_json(segment is not None, self._group))
        self._segment = segment if self._has_room else None


def _unnamed_file(nbytes: int) -> IO[bytes] | None:
    """Return an unnamed file with reserved space, so that writing to its map cannot fail; None without room."""
    if sys.platform != "linux":
        return None
    makers: list[Callable[[], IO[bytes]]] = [tempfile.TemporaryFile]
    # If a control group has no room, the kernel kills a process that asks for memory, without an error.
    if nbytes <= read_private_memory().free_bytes // 2:
        makers.insert(0, lambda: os.fdopen(os.memfd_create("osora"), "r+b"))
    for make in makers:
        with suppress(OSError), ExitStack() as opened:
            file = opened.enter_context(make())
            os.posix_fallocate(file.fileno(), 0, nbytes)
            opened.pop_all()
            return file
    return None


def _identity(file: int | str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def _mapped(path: str | None, device: int, inode: int, *, nbytes: int) -> Tensor | None:
    """Return a map of another process's file; None if its files cannot be seen."""
    with suppress(OSError, RuntimeError):
        # In a separate container, the same process ID may belong to another process.
        if path is not None and _identity(path) == (device, inode):
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    return None
