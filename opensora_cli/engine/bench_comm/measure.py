"""Times of one operation, as nccl-tests takes them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from opensora_cli.core.device import has_streams, seconds_between, synchronize, timed, timing_event

_LIMIT_S = 10.0
"""Seconds after which slow links get fewer calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one operation over its repeats. Percentiles are nearest ranks."""

    min_s: float
    avg_s: float
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times":
        """Return the statistics of at least one repeat."""
        p50_s, p99_s = np.percentile(seconds, (50, 99), method="inverted_cdf").tolist()
        return cls(min_s=min(seconds), avg_s=sum(seconds) / len(seconds), p50_s=p50_s, p99_s=p99_s)


def measure(
    run: Callable[[], object], *, warmup: int, iters: int, device: torch.device, group: dist.ProcessGroup
) -> tuple[Times, int]:
    """Return the times of `run`, which all ranks of the group call, and how many calls were timed.

    A repeat's time is the mean over ranks, which is nccl-tests' default (`-a 1`). `warmup` is at least 2: the first
    call connects the ranks, the second gives the time of a call.
    """
    run()
    affordable = max(int(_LIMIT_S / _slowest(run, device, group)), 1)
    for _ in range(min(warmup - 2, affordable)):
        run()
    meet(device, group)
    iters = min(iters, affordable)
    own = _by_events(run, iters, device) if has_streams(device) else _by_clock(run, iters)
    seconds = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, group=group)
    return Times.of((seconds / group.size()).tolist()), iters


def _slowest(run: Callable[[], object], device: torch.device, group: dist.ProcessGroup) -> float:
    """Return the seconds of one call on the slowest rank, the same on all ranks."""
    meet(device, group)
    seconds = torch.tensor([timed(run, device)], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return float(seconds)


def meet(device: torch.device, group: dist.ProcessGroup) -> None:
    """Wait for all ranks of a group and their devices."""
    value = torch.zeros(1, device=device)
    dist.all_reduce(value, group=group)
    value.item()
    synchronize(device)


def _by_clock(run: Callable[[], object], iters: int) -> list[float]:
    marks = [time.perf_counter()]
    for _ in range(iters):
        run()
        marks.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(marks)]


def _by_events(run: Callable[[], object], iters: int, device: torch.device) -> list[float]:
    # Events, not the clock: waiting for the device between repeats would add the latency of its launch to each.
    marks = [timing_event(device)]
    for _ in range(iters):
        run()
        marks.append(timing_event(device))
    synchronize(device)
    return [seconds_between(begin, end) for begin, end in pairwise(marks)]
