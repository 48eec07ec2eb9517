"""Memory that this process can still have before the kernel ends one, and how the process frees it.

Page cache counts as free, since the kernel gives it up: so do the pages of mapped files that nobody has written to.
Swap does not count.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships none

from opensora_cli.core.cgroups import cgroup_folders, read_words

_M_MMAP_THRESHOLD = -3
"""Parameter of glibc's mallopt: size of the smallest allocation that is mapped by itself."""
_MAPPED_FROM = 2**20
_LARGEST_THRESHOLD = 2**25
"""Threshold that glibc reaches by itself."""
_CACHE_V2 = {"active_file": 1, "inactive_file": 1, "slab_reclaimable": 1, "file_dirty": -1, "file_writeback": -1}
_CACHE_V1 = {"total_active_file": 1, "total_inactive_file": 1, "total_dirty": -1, "total_writeback": -1}
"""What a group's usage has of page cache that can be given up at once, and what of it must be written first."""


@dataclass(frozen=True, slots=True)
class PrivateMemory:
    """The memory that this process can have for itself, in bytes."""

    free_bytes: int
    """More than it has already."""
    total_bytes: int
    """All processes together: the machine's memory, or the least limit of its groups."""


def read_private_memory(root: Path = Path("/")) -> PrivateMemory:
    """Return what there is now: of the machine, and of every group that this process is in, the least."""
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    for limit, free_of_group in _groups(root):
        free, total = min(free, free_of_group), min(total, limit)
    return PrivateMemory(free_bytes=max(0, free), total_bytes=total)


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and free bytes of each group that has a limit."""
    for folder, is_v2 in cgroup_folders(root, "memory", folders_v1=("memory",)):
        # Over memory.high a group is not killed, but slowed down until it hardly moves.
        names = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
        limits = [int(word) for name in names for word in read_words(folder, name) if word.isdigit()]
        used = read_words(folder, "memory.current" if is_v2 else "memory.usage_in_bytes")
        if limits and used and used[0].isdigit():
            in_use = max(0, int(used[0]) - _reclaimable(folder, _CACHE_V2 if is_v2 else _CACHE_V1))
            yield min(limits), min(limits) - in_use


def _reclaimable(folder: Path, kinds: dict[str, int]) -> int:
    words = read_words(folder, "memory.stat")
    sizes = dict(zip(words[::2], words[1::2], strict=False))
    return max(0, sum(sign * int(sizes[name]) for name, sign in kinds.items() if sizes.get(name, "").isdigit()))


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Map large CPU tensors one by one inside the block, so that their memory is free as soon as they are.

    glibc raises its threshold for mapping to 32 MiB as large allocations are freed. Below it, small objects split the
    place of a freed tensor, and the heap grows with each tensor. Fresh pages cost time. Other C libraries ignore this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
