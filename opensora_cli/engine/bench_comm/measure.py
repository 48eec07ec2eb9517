"""Times of one operation, as nccl-tests takes them, and the bytes that it sends.

Every collective of torch passes the dispatcher, where a mode counts the bytes that this rank sends.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from opensora_cli.core.device import has_streams, seconds_between, synchronize, timed, timing_event
from opensora_cli.memory.counting import DispatchMode
from opensora_cli.parallel.shares import shares

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


@dataclass(slots=True)
class Traffic:
    """Bytes that one rank, or all ranks, send with algorithms that send as little as possible.

    An all-reduce is counted as a ring's: 2(n-1) parts of n. Summed over all ranks of a group, counts are exact.
    """

    num_bytes: int = 0


@contextmanager
def counted_bytes() -> Iterator[Traffic]:
    """Count inside the block, forward and backward, in this process.

    Barriers count nothing. So do the functional collectives of `torch.compile`, which osora does not use.
    """
    sent = Traffic()
    with _Counting(sent):
        yield sent


class _Counting(DispatchMode):
    def __init__(self, sent: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sent = sent

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func.namespace == "c10d" and func._opname in _COUNTS:
            self._sent.num_bytes += _COUNTS[func._opname](args)
        return func(*args, **(kwargs or {}))


# The arguments are those of c10d's operators (torch/csrc/distributed/c10d/Ops.cpp), the same since torch 2.1.


def _all_reduce(args: tuple[Any, ...]) -> int:
    group = _group(args[1])
    return sum(shares(2 * (group.size() - 1) * tensor.nbytes, group.size())[group.rank()] for tensor in args[0])


def _broadcast(args: tuple[Any, ...]) -> int:
    tensors, group, root = args[0], _group(args[1]), args[2]
    # Passed on from rank to rank: all but the last send it once.
    is_last = group.rank() == (root - 1) % group.size()
    return 0 if is_last else _bytes(tensors)


def _all_to_all_whole(args: tuple[Any, ...]) -> int:
    sent, group, lengths = args[1], _group(args[2]), args[4]
    rows = lengths[group.rank()] if lengths else sent.shape[0] // group.size()
    return int(sent.nbytes - sent[:rows].nbytes)


def _all_to_all_pieces(args: tuple[Any, ...]) -> int:
    return _bytes(piece for rank, piece in enumerate(args[1]) if rank != _group(args[2]).rank())


def _to_all_others(own: Iterable[torch.Tensor], boxed: torch.ScriptObject) -> int:
    return _bytes(own) * (_group(boxed).size() - 1)


_COUNTS: Mapping[str, Callable[[tuple[Any, ...]], int]] = {
    "allreduce_": _all_reduce,
    "broadcast_": _broadcast,
    "_allgather_base_": lambda args: _to_all_others([args[1]], args[2]),
    "allgather_": lambda args: _to_all_others(args[1], args[2]),
    "_reduce_scatter_base_": lambda args: _to_all_others([args[0]], args[2]),
    "alltoall_base_": _all_to_all_whole,
    "alltoall_": _all_to_all_pieces,
    "send": lambda args: _bytes(args[0]),
}


def _group(boxed: torch.ScriptObject) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(boxed)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
