"""Times of one operation, as nccl-tests takes them: warm-up, repeats back to back, and the mean over ranks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one operation over its repeats."""

    min_s: float
    avg_s: float
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times":
        """Return the statistics of at least one repeat; percentiles are nearest ranks."""
        ordered = sorted(seconds)
        return cls(
            min_s=ordered[0],
            avg_s=sum(ordered) / len(ordered),
            p50_s=_nearest_rank(ordered, 50),
            p99_s=_nearest_rank(ordered, 99),
        )


def _nearest_rank(ordered: Sequence[float], percent: int) -> float:
    return ordered[max(-(-percent * len(ordered) // 100), 1) - 1]


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often something is done."""

    warmup: int
    """Calls before the clock starts, at least 2: the first connects the ranks, the second says what a call takes."""
    iters: int
    """Timed calls, at least 1."""
    limit_s: float = 10.0
    """Where they would take longer there are fewer, so that slow links end, too."""


def measure(
    run: Callable[[], object], repeats: Repeats, *, device: torch.device, group: dist.ProcessGroup
) -> tuple[Times, int]:
    """Return the times of `run`, which all ranks of the group call together, and how many calls were timed.

    A repeat's time is the mean over ranks, which is nccl-tests' default (`-a 1`).

    Args:
        run: the operation.
        repeats: how often.
        device: of this rank.
        group: of all ranks.
    """
    run()
    slowest_s = _slowest(run, device, group)
    affordable = max(int(repeats.limit_s / slowest_s), 1)
    for _ in range(min(repeats.warmup - 2, affordable)):
        run()
    meet(device, group)
    iters = min(repeats.iters, affordable)
    own = _on_cuda(run, iters, device) if device.type == "cuda" else _on_cpu(run, iters)
    seconds = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, group=group)
    return Times.of((seconds / group.size()).tolist()), iters


def _slowest(run: Callable[[], object], device: torch.device, group: dist.ProcessGroup) -> float:
    """Return the seconds of one call on the slowest rank, the same on all ranks."""
    meet(device, group)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return float(seconds)


def meet(device: torch.device, group: dist.ProcessGroup) -> None:
    """Wait until all ranks of a group have come here, and their devices have nothing left to do."""
    value = torch.zeros(1, device=device)
    dist.all_reduce(value, group=group)
    value.item()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on_cpu(run: Callable[[], object], iters: int) -> list[float]:
    marks = [time.perf_counter()]
    for _ in range(iters):
        run()
        marks.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(marks)]


def _on_cuda(run: Callable[[], object], iters: int, device: torch.device) -> list[float]:
    # Events, not the clock: waiting for the device between repeats would add the latency of its launch to each.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(iters + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]
