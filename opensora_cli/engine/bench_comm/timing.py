"""Times of one operation, as nccl-tests takes them: warm-up, repeats back to back, and the mean over ranks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from opensora_cli.core.device import has_streams, seconds_between, synchronize, timed, timing_event
from opensora_cli.core.documents import Document


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
    """Numbers of calls of an operation."""

    warmup: int
    """Calls before the clock starts, at least 2: the first connects the ranks, the second gives the time of a call."""
    iters: int
    """Timed calls, at least 1."""
    limit_s: float = 10.0
    """Seconds after which slow links get fewer calls."""


def measure(
    run: Callable[[], object], repeats: Repeats, *, device: torch.device, group: dist.ProcessGroup
) -> tuple[Times, int]:
    """Return the times of `run`, which all ranks of the group call, and how many calls were timed.

    A repeat's time is the mean over ranks, which is nccl-tests' default (`-a 1`).
    """
    run()
    slowest_s = _slowest(run, device, group)
    affordable = max(int(repeats.limit_s / slowest_s), 1)
    for _ in range(min(repeats.warmup - 2, affordable)):
        run()
    meet(device, group)
    iters = min(repeats.iters, affordable)
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


class LatencyBandwidth(Document):
    """The latency-bandwidth model of communication, t = a + b * bytes (Hockney 1994)."""

    latency_s: float
    """a: time of a collective without bytes."""
    seconds_per_byte: float
    """b: time of each byte that one rank sends."""

    @property
    def bandwidth_gb_per_s(self) -> float | None:
        """1/b. None if the time does not grow with the bytes."""
        return 1e-9 / self.seconds_per_byte if self.seconds_per_byte > 0 else None


def fit_latency_bandwidth(num_bytes: Sequence[float], seconds: Sequence[float]) -> LatencyBandwidth:
    """Fit a and b by least squares of the relative errors, so that 8 bytes count as much as 1 GiB.

    Neither becomes negative: where that would fit best, it is 0 and the other is fitted alone. `seconds` are positive.
    """
    # With u = 1/t and v = bytes/t the relative error is a u + b v - 1.
    u = [1 / t for t in seconds]
    v = [size / t for size, t in zip(num_bytes, seconds, strict=True)]
    uu, uv, vv = (sum(x * y for x, y in zip(*pair, strict=True)) for pair in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        latency = (sum(u) * vv - sum(v) * uv) / determinant
        per_byte = (sum(v) * uu - sum(u) * uv) / determinant
        if latency >= 0 and per_byte >= 0:
            return LatencyBandwidth(latency_s=latency, seconds_per_byte=per_byte)
        if per_byte >= 0:
            return LatencyBandwidth(latency_s=0.0, seconds_per_byte=sum(v) / vv)
    # A single size, or times that fall with the size: everything is latency.
    return LatencyBandwidth(latency_s=sum(u) / uu, seconds_per_byte=0.0)
