"""Memory that this process can allocate before the kernel kills a process, and ways to free memory.

Page cache and unmodified pages of mapped files count as free because the kernel reclaims them. Swap does not count.
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
"""Parts of a group's page cache: 1 for parts that can be reclaimed, -1 for parts that must be written first."""


@dataclass(frozen=True, slots=True)
class PrivateMemory:
    """Memory that this process can have for itself, in bytes."""

    free_bytes: int
    """Memory that the process can still allocate."""
    total_bytes: int
    """Memory of all processes together: that of the machine, or the least limit of its groups."""


def read_private_memory(root: Path = Path("/")) -> PrivateMemory:
    """Return the present memory: the minimum of the machine and of every group of this process."""
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    for limit, free_of_group in _groups(root):
        free, total = min(free, free_of_group), min(total, limit)
    return PrivateMemory(free_bytes=max(0, free), total_bytes=total)


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the free bytes of each group that has a limit."""
    for folder, is_v2 in cgroup_folders(root, "memory", folders_v1=("memory",)):
        # A group above memory.high is not killed, but throttled heavily.
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
    """Map each large CPU tensor separately inside the block, so that freeing it returns its memory to the system.

    glibc raises its threshold for mapping to 32 MiB as large allocations are freed. Below it, small objects fragment
    the memory of freed tensors, and the heap grows with each tensor. New pages cost time. Only glibc has this setting.
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
