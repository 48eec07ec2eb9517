"""Processor time and memory that this process may use: the limits of the machine and of control groups (v2 and v1).

torch ignores the quota of a container when it chooses the number of threads. Page cache and unmodified pages of mapped
files count as free memory because the kernel reclaims them. Swap does not count.
"""

import ctypes
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]  # it ships none
from pydantic import Field

from opensora_cli.core.documents import Document
from opensora_cli.core.formatting import first_few
from opensora_cli.core.progress import Reporter

_M_MMAP_THRESHOLD = -3
"""Parameter of glibc's mallopt: size of the smallest allocation that is mapped by itself."""
_MAPPED_FROM = 2**20
_LARGEST_THRESHOLD = 2**25
"""Threshold that glibc reaches by itself."""
_CACHE_V2 = {"active_file": 1, "inactive_file": 1, "slab_reclaimable": 1, "file_dirty": -1, "file_writeback": -1}
_CACHE_V1 = {"total_active_file": 1, "total_inactive_file": 1, "total_dirty": -1, "total_writeback": -1}
"""Parts of a group's page cache: 1 for parts that can be reclaimed, -1 for parts that must be written first."""

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which a user chooses the number of threads; torch reads them."""
RANK_VARIABLE = "OSORA_RANK_THREADS"
"""Variable that the launcher sets to the OMP_NUM_THREADS of a rank, unless a user chose it."""
_VALUES_PER_THREAD = 2**15
"""Least number of values in a piece of an element-wise operation (`at::internal::GRAIN_SIZE` of torch)."""
_ROUNDED_UP = 0.25
"""Largest missing part of a core that is rounded up. Half of a core is not worth a thread that all others wait for."""


class ThreadChoice(Document):
    """Number of threads, with the reason."""

    count: int
    reason: str
    is_free: bool = Field(default=False, exclude=True)
    """Whether neither a setting nor a variable named the number."""

    def line(self) -> str:
        return f"{self.count} ({self.reason})"


def pick_threads(*, asked: int | None, values: int | None = None, ranks: int = 1) -> ThreadChoice:
    """Return the number of threads of this process.

    Args:
        asked: number of the settings; None to choose it.
        values: values in a layer of the main model; None means enough for any number of threads.
        ranks: processes that share this machine.
    """
    import torch

    named = named_threads(os.environ, asked=asked, now=torch.get_num_threads())
    if named is not None:
        return named
    return choose_threads(*read_cores(), useful=None if values is None else values // _VALUES_PER_THREAD, ranks=ranks)


def choose_threads(cores: int, quota: float | None, *, useful: int | None = None, ranks: int = 1) -> ThreadChoice:
    """Return the number of threads of each of `ranks` processes, which have work for `useful` threads each."""
    reasons = [f"{cores} {'core' if cores == 1 else 'cores'}"]
    free = float(cores)
    if quota is not None and quota < free:
        free = quota
        reasons.append(f"the quota is {quota:g}")
    if ranks > 1:
        free /= ranks
        reasons.append(f"{ranks} processes")
    count = max(1, math.floor(free + _ROUNDED_UP))
    if useful is not None and useful < count:
        count = max(1, useful)
        reasons.append(f"work for {count}")
    return ThreadChoice(count=count, reason=", ".join(reasons), is_free=True)


def named_threads(environment: Mapping[str, str], *, asked: int | None, now: int) -> ThreadChoice | None:
    """Return the number that a user has chosen: `asked`, or `now` if a variable has set it; None without either.

    A variable of `variables_of_ranks` is not the user's.
    """
    if asked is not None:
        return ThreadChoice(count=asked, reason="as set")
    named = [name for name in VARIABLES if environment.get(name)]
    if named == ["OMP_NUM_THREADS"] and environment["OMP_NUM_THREADS"] == environment.get(RANK_VARIABLE):
        return None
    return ThreadChoice(count=now, reason=first_few(named)) if named else None


def variables_of_ranks(environment: Mapping[str, str], *, ranks: int) -> dict[str, str]:
    """Return variables that limit the threads of each of `ranks` processes until they choose their number.

    Processes that each take all cores slow each other down. The result is empty if the user has chosen.
    """
    if any(environment.get(name) for name in VARIABLES):
        return {}
    count = str(choose_threads(*read_cores(), ranks=ranks).count)
    return {"OMP_NUM_THREADS": count, RANK_VARIABLE: count}


@contextmanager
def threads_used(choice: ThreadChoice, reporter: Reporter) -> Iterator[None]:
    """Let torch compute with so many threads inside the block, and note the number and the reason."""
    import torch

    reporter.note(f"threads: {choice.line()}")
    before = torch.get_num_threads()
    torch.set_num_threads(choice.count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def read_cores(root: Path = Path("/")) -> tuple[int, float | None]:
    """Return the cores that this process may use, and the least quota of its groups, in cores; None means no limit."""
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
    return allowed, min(quotas, default=None)


class PrivateMemory(NamedTuple):
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
    return PrivateMemory(max(0, free), total)


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
