"""Collectives that are measured: buffers, one run with its times, and a check with numbers that depend on the rank.

Sizes follow nccl-tests: what one rank sends or receives as a whole. For all-gather and reduce-scatter that is the
array of all ranks. A size is rounded down to whole elements for every rank, but to at least one.

For the check, the element at index i that rank r writes is (i mod 31 + 1)(r + 1), so that a wrong element is found
exactly. Sums over ranks stay exact in float32 up to a thousand ranks, and so do moved values in any dtype, since both
sides round alike.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from opensora_cli.core.device import has_streams, seconds_between, synchronize, timed, timing_event
from opensora_cli.parallel.collectives import all_gather_single, reduce_scatter_single
from opensora_cli.settings.tools import Collective

_LIMIT_S = 10.0
"""Seconds after which slow links get fewer calls."""
_PERIOD = 31
_UNDIVIDED = (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.SEND_RECV)
_CHUNK = 1 << 22
"""Elements made at a time, so that checking 1 GiB needs no other GiB."""


@dataclass(frozen=True, slots=True)
class Place:
    """Group and device of an operation."""

    group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """Number of ranks in the group."""
        return self.group.size()

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros on the device: timed sums over zeros stay zeros, however often they repeat."""
        return torch.zeros(count, dtype=dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective on buffers of one size."""

    size_bytes: int
    """Size by the convention of nccl-tests."""
    dtype: torch.dtype
    run: Callable[[], object]
    """Runs the collective once, on buffers of zeros."""
    count_wrong: Callable[[], int]
    """Runs the collective on numbers that depend on the rank, and counts the wrong elements of this rank."""


def bus_factor(collective: Collective, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth (NVIDIA, nccl-tests, doc/PERFORMANCE.md)."""
    if collective is Collective.ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if collective in (Collective.BROADCAST, Collective.SEND_RECV):
        return 1.0
    return (ranks - 1) / ranks


def make_operation(collective: Collective, place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Return a collective on buffers of a size.

    all_to_all sends another equal piece to each rank; send_recv passes tensors on in a ring, all at once.
    """
    group, rank, ranks = place.group, place.rank, place.ranks
    parts = 1 if collective in _UNDIVIDED else ranks
    whole = place.zeros(max(size_bytes // dtype.itemsize // parts, 1) * parts, dtype)
    length = whole.numel() // ranks
    # Tensor that this rank fills, index of its first number, and the tensor with the result. Its equal pieces have the
    # numbers of these scales, from these indexes on.
    filled, start, result = whole, 0, whole
    pieces = [(sum_of_scales(ranks), 0)]
    run: Callable[[], object]
    match collective:
        case Collective.ALL_REDUCE:
            run = partial(dist.all_reduce, whole, group=group)
        case Collective.BROADCAST:
            pieces = [(1, 0)]
            run = partial(dist.broadcast, whole, group_src=0, group=group)
        case Collective.SEND_RECV:
            result, pieces = torch.zeros_like(whole), [((rank - 1) % ranks + 1, 0)]
            run = partial(_pass_on, place, whole, result)
        case Collective.ALL_GATHER:
            filled, start = place.zeros(length, dtype), rank * length
            pieces = [(source + 1, source * length) for source in range(ranks)]
            run = partial(all_gather_single, whole, filled, group=group)
        case Collective.REDUCE_SCATTER:
            result, pieces = place.zeros(length, dtype), [(sum_of_scales(ranks), rank * length)]
            run = partial(reduce_scatter_single, result, whole, group=group)
        case _:
            result, pieces = torch.zeros_like(whole), [(source + 1, rank * length) for source in range(ranks)]
            run = partial(dist.all_to_all_single, result, whole, group=group)

    def count_wrong() -> int:
        fill(filled, scale=rank + 1, start=start)
        run()
        return sum(
            count_mismatches(piece, scale=scale, start=at)
            for piece, (scale, at) in zip(result.view(len(pieces), -1), pieces, strict=True)
        )

    return Operation(whole.nbytes, whole.dtype, run, count_wrong)


def _pass_on(place: Place, sent: torch.Tensor, received: torch.Tensor) -> None:
    before, after = (dist.get_global_rank(place.group, (place.rank + step) % place.ranks) for step in (-1, 1))
    pair = [
        dist.P2POp(dist.isend, sent, after, group=place.group),
        dist.P2POp(dist.irecv, received, before, group=place.group),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


BUFFERS = 2
"""Buffers of the measured size that a collective holds at most."""


def fill(values: torch.Tensor, *, scale: int, start: int = 0) -> None:
    """Write the pattern into a contiguous tensor, in its dtype.

    `scale` is rank + 1, or the sum of that over ranks; `start` is the index of the first element.
    """
    for part, expected in _chunks(values, scale=scale, start=start):
        part.copy_(expected)


def count_mismatches(values: torch.Tensor, *, scale: int, start: int = 0) -> int:
    """Return how many elements of a contiguous tensor are not those of `fill`."""
    return sum(int((part != expected).sum()) for part, expected in _chunks(values, scale=scale, start=start))


def sum_of_scales(ranks: int) -> int:
    """Return the scale of a sum over all ranks."""
    return ranks * (ranks + 1) // 2


def _chunks(values: torch.Tensor, *, scale: int, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parts of a tensor, each with its numbers of the pattern."""
    for number, part in enumerate(torch.split(values.view(-1), _CHUNK)):
        # Only the remainder of the start matters, and keeps the indexes small.
        first = (start + number * _CHUNK) % _PERIOD
        indexes = torch.arange(first, first + part.numel(), dtype=torch.int32, device=part.device)
        yield part, (indexes % _PERIOD + 1).mul_(scale).float().to(part.dtype)


def measure(
    run: Callable[[], object], *, warmup: int, iters: int, device: torch.device, group: dist.ProcessGroup
) -> list[float]:
    """Return the seconds of repeats of `run`, which all ranks of the group call: `iters`, or fewer over slow links.

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
    return [float(each) for each in seconds / group.size()]


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
