"""Asynchronous collectives in the order that measurements favour, the same on all ranks."""

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
    """What was measured of one group's collectives: totals, and the latency and bandwidth that fit them.

    The fit is seconds = latency + bytes / bandwidth by least squares, in which older measurements weigh less and less
    (Hockney 1994 for the model): a new one multiplies their weight by `forgetting`, from 0 to below 1.
    """

    forgetting: float = 0.9
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    _weight: float = 0.0
    _mean_bytes: float = 0.0
    _mean_seconds: float = 0.0
    _spread: float = 0.0
    """The weighted sum of squared distances of the bytes from their mean."""
    _joint: float = 0.0
    """The same of the products of bytes and seconds."""

    def record(self, nbytes: int, seconds: float) -> None:
        """Take in a collective that moved `nbytes` of this rank in `seconds`."""
        self.calls, self.nbytes, self.seconds = self.calls + 1, self.nbytes + nbytes, self.seconds + seconds
        kept = self.forgetting * self._weight
        self._weight = kept + 1.0
        # Means and sums move together (West 1979): differences of large sums would lose their digits.
        far, off = nbytes - self._mean_bytes, seconds - self._mean_seconds
        self._spread = self.forgetting * self._spread + far * far * kept / self._weight
        self._joint = self.forgetting * self._joint + far * off * kept / self._weight
        self._mean_bytes += far / self._weight
        self._mean_seconds += off / self._weight

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bytes of a rank in a second, latency aside; infinite as long as more bytes took no more time.

        With measurements of one size only, latency counts as part of it.
        """
        if self._spread == 0.0:
            return self._mean_bytes / self._mean_seconds if self._mean_seconds > 0.0 else math.inf
        return self._spread / self._joint if self._joint > 0.0 else math.inf

    @property
    def latency_s(self) -> float:
        """Seconds that a collective of no bytes would take."""
        return max(0.0, self._mean_seconds - self._mean_bytes / self.bandwidth_bytes_per_s)

    def predicted_s(self, nbytes: int) -> float:
        """Return how many seconds a collective of `nbytes` should take."""
        return self.latency_s + nbytes / self.bandwidth_bytes_per_s


class Slow(NamedTuple):
    """A collective that took far longer than others of its group."""

    name: str
    """Of its group."""
    seconds: float
    usual_s: float
    """What it should have taken, by those before."""


class BandwidthMonitor:
    """Remembers how fast the collectives of each process group are, as this rank sees them.

    A collective counts as slow if it takes over `slow_factor` times what those before it, at least `known_after`,
    let expect, and `slow_s` longer.
    """

    def __init__(self, *, slow_factor: float = 5.0, slow_s: float = 0.05, known_after: int = 20) -> None:
        self._links: dict[dist.ProcessGroup, Link] = {}
        self._slow_factor, self._slow_s, self._known_after = slow_factor, slow_s, known_after
        self._names: dict[dist.ProcessGroup, str] = {}
        self._timed: deque[tuple[dist.ProcessGroup, int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._taken: dict[str, tuple[int, float]] = {}
        self._slow: list[Slow] = []

    def link(self, group: dist.ProcessGroup) -> Link:
        """Return what is known of a group; at first nothing is, and everything takes no time."""
        return self._links.setdefault(group, Link())

    def name(self, group: dist.ProcessGroup, name: str) -> None:
        """Set what a group is called in `take` and `Slow`."""
        self._names[group] = name

    @contextmanager
    def measure(self, group: dist.ProcessGroup, nbytes: int, *, device: torch.device | str) -> Iterator[None]:
        """Measure the block as one collective of `group` that moves `nbytes` of this rank's.

        `device` is waited for before and after, so that its work is measured and nothing else.
        """
        _finish(device)
        start = time.perf_counter()
        yield
        _finish(device)
        self.record(group, nbytes, time.perf_counter() - start)

    @contextmanager
    def observe(self, group: dist.ProcessGroup, nbytes: int, *, device: torch.device) -> Iterator[None]:
        """Do as `measure`, without waiting for a GPU: `take` counts what has ended on it."""
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
        """Take in a collective of `group` that moved `nbytes` of this rank in `seconds`."""
        link, name = self.link(group), self._names.get(group, group.group_name)
        if link.calls >= self._known_after:
            usual_s = link.predicted_s(nbytes)
            if seconds > self._slow_factor * usual_s and seconds > usual_s + self._slow_s:
                self._slow.append(Slow(name, seconds, usual_s))
        link.record(nbytes, seconds)
        before = self._taken.get(name, (0, 0.0))
        self._taken[name] = before[0] + nbytes, before[1] + seconds

    def take(self) -> tuple[dict[str, float], list[Slow]]:
        """Return bytes per second of each group, by its name, and what was slow, since the last call."""
        while self._timed and self._timed[0][3].query():  # type: ignore[no-untyped-call]
            group, nbytes, start, end = self._timed.popleft()
            self.record(group, nbytes, start.elapsed_time(end) / 1e3)
        rates = {name: nbytes / seconds for name, (nbytes, seconds) in self._taken.items() if seconds > 0.0}
        slow, self._taken, self._slow = self._slow, {}, []
        return rates, slow


class Handle:
    """A collective that was submitted."""

    def __init__(self, scheduler: "CommunicationScheduler", queued: "_Queued") -> None:
        self._scheduler, self._queued = scheduler, queued

    def wait(self) -> Tensor:
        """Return the result, once it is there; issues what must be issued for that."""
        return self._scheduler.finish(self._queued)


class CommunicationScheduler:
    """Queues asynchronous collectives and issues them, those first that should take the shortest.

    Serving the shortest first makes the mean wait the least (Smith 1956). What should take how long is what rank 0's
    `monitor` has measured: collectives of a group must be issued in one order on all of its ranks, and ranks that
    decided by themselves would wait for one another for ever.

    All ranks submit the same collectives in the same order, and sooner or later wait for each. They may wait in any
    order, and at different points: a queue is issued as far as all ranks have submitted it, again and again until what
    is waited for is under way.

    `group` has gloo for the host's messages, as `backend_of` gives it; None: all ranks. The collectives may use other
    groups among its ranks, but only the scheduler issues any meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup | None, monitor: BandwidthMonitor) -> None:
        self._group, self._monitor = group, monitor
        self._queue: list[_Queued] = []

    def submit(self, start: Callable[[], dist.Work], result: Tensor, *, group: dist.ProcessGroup) -> Handle:
        """Queue a collective of `group`.

        `start` issues it with `async_op=True` and returns its handle. Its tensors must not be changed until it is
        waited for. `result` is where the result will be; its bytes are those of the collective.
        """
        self._queue.append(_Queued(start, result, group))
        return Handle(self, self._queue[-1])

    def finish(self, queued: "_Queued") -> Tensor:
        """Wait for a collective that was submitted and return its result; `Handle.wait` does this."""
        while queued.work is None:
            self._issue()
        queued.work.wait()
        return queued.result

    def flush(self) -> None:
        """Issue all that was submitted; all ranks must call it, or wait for the last."""
        while self._queue:
            self._issue()

    def _issue(self) -> None:
        # At least one: a rank comes here only for something that it has submitted.
        count = torch.tensor(len(self._queue))
        dist.all_reduce(count, op=dist.ReduceOp.MIN, group=self._group)
        batch, self._queue = self._queue[: int(count)], self._queue[int(count) :]
        order = torch.tensor(self._favoured(batch))
        dist.broadcast(order, group=self._group, group_src=0)
        for index in order.tolist():
            batch[index].work = batch[index].start()

    def _favoured(self, batch: "list[_Queued]") -> list[int]:
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
