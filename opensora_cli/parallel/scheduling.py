"""Asynchronous collectives in the best measured order, the same on all ranks."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(slots=True)
class Link:
    """Measurements of one group's collectives: totals, and the fitted latency and bandwidth.

    The fit is seconds = latency + bytes / bandwidth by least squares (Hockney 1994 for the model). Each new measurement
    multiplies the weight of older ones by `forgetting`, from 0 to below 1.
    """

    forgetting: float = 0.9
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    _weight: float = 0.0
    _mean_bytes: float = 0.0
    _mean_seconds: float = 0.0
    _spread: float = 0.0
    """Weighted sum of squared deviations of the bytes from their mean."""
    _joint: float = 0.0
    """Weighted sum of products of the deviations of bytes and seconds."""

    def record(self, nbytes: int, seconds: float) -> None:
        """Record a collective that moved `nbytes` of this rank in `seconds`."""
        self.calls, self.nbytes, self.seconds = self.calls + 1, self.nbytes + nbytes, self.seconds + seconds
        kept = self.forgetting * self._weight
        self._weight = kept + 1.0
        # Means and sums are updated together (West 1979) because differences of large sums would lose precision.
        far, off = nbytes - self._mean_bytes, seconds - self._mean_seconds
        self._spread = self.forgetting * self._spread + far * far * kept / self._weight
        self._joint = self.forgetting * self._joint + far * off * kept / self._weight
        self._mean_bytes += far / self._weight
        self._mean_seconds += off / self._weight

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bandwidth of a rank in bytes per second, without latency; infinite while more bytes take no more time.

        If all measurements have one size, the time includes latency.
        """
        if self._spread == 0.0:
            return self._mean_bytes / self._mean_seconds if self._mean_seconds > 0.0 else math.inf
        return self._spread / self._joint if self._joint > 0.0 else math.inf

    @property
    def latency_s(self) -> float:
        """Latency: seconds of a collective without bytes."""
        return max(0.0, self._mean_seconds - self._mean_bytes / self.bandwidth_bytes_per_s)

    def predicted_s(self, nbytes: int) -> float:
        """Return the predicted seconds of a collective of `nbytes`."""
        return self.latency_s + nbytes / self.bandwidth_bytes_per_s


class Slow(NamedTuple):
    """Collective that took far longer than others of its group."""

    name: str
    """Name of the group."""
    seconds: float
    usual_s: float
    """Predicted seconds from earlier collectives."""


class BandwidthMonitor:
    """Monitor of the bandwidth of each process group's collectives on this rank.

    A collective is slow if it takes over `slow_factor` times its predicted time, and `slow_s` longer. The prediction
    needs at least `known_after` earlier collectives.
    """

    def __init__(self, *, slow_factor: float = 5.0, slow_s: float = 0.05, known_after: int = 20) -> None:
        self._links: dict[dist.ProcessGroup, Link] = {}
        self._slow_factor, self._slow_s, self._known_after = slow_factor, slow_s, known_after
        self._names: dict[dist.ProcessGroup, str] = {}
        self._timed: deque[tuple[dist.ProcessGroup, int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._taken: dict[str, tuple[int, float]] = {}
        self._slow: list[Slow] = []

    def link(self, group: dist.ProcessGroup) -> Link:
        """Return the measurements of a group; without any, all predictions are zero."""
        return self._links.setdefault(group, Link())

    def name(self, group: dist.ProcessGroup, name: str) -> None:
        """Set the name of a group for `take` and `Slow`."""
        self._names[group] = name

    @contextmanager
    def measure(self, group: dist.ProcessGroup, nbytes: int, *, device: torch.device | str) -> Iterator[None]:
        """Measure the context as one collective of `group` that moves `nbytes` of this rank.

        It synchronizes with `device` before and after, so that only the collective is measured.
        """
        _finish(device)
        start = time.perf_counter()
        yield
        _finish(device)
        self.record(group, nbytes, time.perf_counter() - start)

    @contextmanager
    def observe(self, group: dist.ProcessGroup, nbytes: int, *, device: torch.device) -> Iterator[None]:
        """Measure like `measure`, without waiting for a GPU: `take` records collectives that have ended."""
        if device.type != "cuda":
            with self.measure(group, nbytes, device=device):
                yield
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        yield
        end.record()
        self._timed.append((group, nbytes, start, end))

    def record(self, group: dist.ProcessGroup, nbytes: int, seconds: float) -> None:
        """Record a collective of `group` that moved `nbytes` of this rank in `seconds`."""
        link, name = self.link(group), self._names.get(group, group.group_name)
        if link.calls >= self._known_after:
            usual_s = link.predicted_s(nbytes)
            if seconds > self._slow_factor * usual_s and seconds > usual_s + self._slow_s:
                self._slow.append(Slow(name, seconds, usual_s))
        link.record(nbytes, seconds)
        before = self._taken.get(name, (0, 0.0))
        self._taken[name] = before[0] + nbytes, before[1] + seconds

    def take(self) -> tuple[dict[str, float], list[Slow]]:
        """Return the bytes per second of each group by name, and the slow collectives, since the last call."""
        while self._timed and self._timed[0][3].query():  # type: ignore[no-untyped-call]
            group, nbytes, start, end = self._timed.popleft()
            self.record(group, nbytes, start.elapsed_time(end) / 1e3)
        rates = {name: nbytes / seconds for name, (nbytes, seconds) in self._taken.items() if seconds > 0.0}
        slow, self._taken, self._slow = self._slow, {}, []
        return rates, slow


class Handle:
    """Handle of a submitted collective."""

    def __init__(self, scheduler: "CommunicationScheduler", queued: "_Queued") -> None:
        self._scheduler, self._queued = scheduler, queued

    def wait(self) -> Tensor:
        """Wait for the result and return it; issue the queued collectives that this requires."""
        return self._scheduler.finish(self._queued)


class CommunicationScheduler:
    """Scheduler that queues asynchronous collectives and issues the shortest ones first.

    This order minimizes the mean wait (Smith 1956). Times come from the `monitor` of rank 0 because collectives of a
    group must be issued in one order on all of its ranks: ranks with different orders would deadlock.

    All ranks must submit the same collectives in the same order, and wait for each at some time. They may wait in any
    order, and at different points. The part of the queue that all ranks have submitted is issued, repeatedly until the
    awaited collective has started.

    `group` must have gloo for messages of the host, as from `backend_of`. None means all ranks. The collectives may use
    other groups among its ranks, but only the scheduler may issue collectives in the meantime.
    """

    def __init__(self, group: dist.ProcessGroup | None, monitor: BandwidthMonitor) -> None:
        self._group, self._monitor = group, monitor
        self._queue: list[_Queued] = []

    def submit(self, start: Callable[[], dist.Work], result: Tensor, *, group: dist.ProcessGroup) -> Handle:
        """Queue a collective of `group`.

        `start` issues it with `async_op=True` and returns its handle. Its tensors must not be changed before the wait.
        `result` is the tensor for the result; its bytes are those of the collective.
        """
        self._queue.append(_Queued(start, result, group))
        return Handle(self, self._queue[-1])

    def finish(self, queued: "_Queued") -> Tensor:
        """Wait for a submitted collective and return its result; `Handle.wait` calls this."""
        while queued.work is None:
            self._issue()
        queued.work.wait()
        return queued.result

    def flush(self) -> None:
        """Issue all submitted collectives. All ranks must call this, or wait for the last collective."""
        while self._queue:
            self._issue()

    def _issue(self) -> None:
        # The count is at least one because a rank only calls this for its submitted collectives.
        count = torch.tensor(len(self._queue))
        dist.all_reduce(count, op=dist.ReduceOp.MIN, group=self._group)
        batch, self._queue = self._queue[: int(count)], self._queue[int(count) :]
        order = torch.tensor(self._favored(batch))
        dist.broadcast(order, group=self._group, group_src=0)
        for index in order.tolist():
            batch[index].work = batch[index].start()

    def _favored(self, batch: "list[_Queued]") -> list[int]:
        seconds = [self._monitor.link(queued.group).predicted_s(queued.result.nbytes) for queued in batch]
        return sorted(range(len(batch)), key=seconds.__getitem__)


@dataclass(slots=True, eq=False)
class _Queued:
    start: Callable[[], dist.Work]
    result: Tensor
    group: dist.ProcessGroup
    work: dist.Work | None = None


def _finish(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
