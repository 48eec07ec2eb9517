"""Processor time and memory that this process may use: the limits of the machine and of control groups (v2 and v1).

Page cache and unmodified pages of mapped files count as free memory because the kernel reclaims them. Swap does not
count.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships none

_M_MMAP_THRESHOLD = -3
"""Parameter of glibc's mallopt: size of the smallest allocation that is mapped by itself."""
_MAPPED_FROM = 2**20
_LARGEST_THRESHOLD = 2**25
"""Threshold that glibc reaches by itself."""
_CACHE_V2 = {"active_file": 1, "inactive_file": 1, "slab_reclaimable": 1, "file_dirty": -1, "file_writeback": -1}
_CACHE_V1 = {"total_active_file": 1, "total_inactive_file": 1, "total_dirty": -1, "total_writeback": -1}
"""Parts of a group's page cache: 1 for parts that can be reclaimed, -1 for parts that must be written first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Cores that this process may use."""

    allowed: int
    """Cores in the affinity of the process."""
    quota: float | None = None
    """Quota of its cgroups, in cores; None means no limit."""


def read_cores(root: Path = Path("/")) -> Cores:
    """Return the cores that this process may use. The quota is the least of all groups of this process."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = []
    for folder, is_v2 in _group_folders(root, "cpu"):
        words = _words(folder, *(("cpu.max",) if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")))
        try:
            quota, period = float(words[0]), float(words[1])
        except (ValueError, IndexError):  # missing, or `max`
            continue
        if quota > 0 and period > 0:
            quotas.append(quota / period)
    return Cores(allowed=allowed, quota=min(quotas, default=None))


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
    for folder, is_v2 in _group_folders(root, "memory"):
        # A group above memory.high is not killed, but throttled heavily.
        names = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
        limits = [int(word) for name in names for word in _words(folder, name) if word.isdigit()]
        used = _words(folder, "memory.current" if is_v2 else "memory.usage_in_bytes")
        if limits and used and used[0].isdigit():
            words = _words(folder, "memory.stat")
            sizes = dict(zip(words[::2], words[1::2], strict=False))
            signs = (_CACHE_V2 if is_v2 else _CACHE_V1).items()
            cache = sum(sign * int(sizes[name]) for name, sign in signs if sizes.get(name, "").isdigit())
            in_use = max(0, int(used[0]) - max(0, cache))
            free, total = min(free, min(limits) - in_use), min(total, *limits)
    return PrivateMemory(free_bytes=max(0, free), total_bytes=total)


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


def _group_folders(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each group of this process, innermost first, and whether the group has version 2.

    Folders may be missing. In a container, `/proc/self/cgroup` may show paths of the host; the mounted root is then
    this group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, controllers, place = (*line.split(":", 2), "", "")[:3]
        is_v2 = controllers == ""
        if is_v2 or controller in controllers.split(","):
            # The mount of version 1 has the name of one controller or of all in the line.
            for top in ("",) if is_v2 else dict.fromkeys((controllers, controller)):
                mount = root / "sys/fs/cgroup" / top
                folder = mount / place.lstrip("/")
                while folder.is_relative_to(mount):
                    yield folder, is_v2
                    folder = folder.parent


def _words(folder: Path, *names: str) -> list[str]:
    """Return the words in files of a group, one file after the other; empty if a file cannot be read."""
    try:
        return " ".join((folder / name).read_text(encoding="utf-8") for name in names).split()
    except (OSError, UnicodeDecodeError):
        return []
