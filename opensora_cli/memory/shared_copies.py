"""Tensors in the host's memory of which all ranks of a machine hold one copy together."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

_SEGMENT_BYTES = 256 * 2**20
"""Of one file; its memory is free when no tensor in it is in use any more."""
_ALIGNMENT = 512
_SHARED_MEMORY = Path("/dev/shm")


class SharedCopies:
    """Takes tensors that every rank has computed alike, and gives each rank a view of one common copy.

    The copies lie in files without a name, in shared memory where that has room, or else in the folder of temporary
    files. Where neither has, each rank keeps its own. Tensors may be read when the context has ended, and must not be
    written to.

    Args:
        group: the ranks of one machine. All hold the same tensors in the same order.
        segment_bytes: size of one file, unless a tensor is larger.
    """

    def __init__(self, group: dist.ProcessGroup, *, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self._group = group
        self._segment_bytes = segment_bytes
        self._segment: Tensor | None = None
        self._used = 0
        self._has_room = dist.get_world_size(group) > 1

    def __enter__(self) -> "SharedCopies":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Where one has failed, the others need not wait for it.
        if error is None:
            dist.barrier(self._group)

    def hold(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape, dtype and content, which is the common copy.

        Args:
            tensor: on the CPU. Its own memory is free when the caller lets go of it.
        """
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
        path = _make_file(nbytes) if dist.get_rank(self._group) == 0 else None
        names = [None if path is None else str(path)]
        dist.broadcast_object_list(names, group=self._group, group_src=0)
        if names[0] is None:
            self._has_room = False
            return
        self._segment = torch.from_file(names[0], shared=True, size=nbytes, dtype=torch.uint8)
        # All have it open: without its name, it goes when the last of them does.
        dist.barrier(self._group)
        if path is not None:
            path.unlink()


def _make_file(nbytes: int) -> Path | None:
    """Return a new file whose space is reserved, so that writing to its map cannot fail; None: there is no room."""
    for folder in (_SHARED_MEMORY, Path(tempfile.gettempdir())):
        with suppress(OSError):
            descriptor, name = tempfile.mkstemp(prefix="osora-", dir=folder)
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
                return Path(name)
            except OSError:
                Path(name).unlink()
            finally:
                os.close(descriptor)
    return None
