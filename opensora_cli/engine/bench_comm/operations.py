"""The collectives that are measured: buffers, one run, and a check with numbers that depend on the rank.

Sizes follow nccl-tests: what one rank sends or receives as a whole. For all-gather and reduce-scatter that is the
array of all ranks together. A size is rounded down to whole elements for every rank, but to at least one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from opensora_cli.engine.bench_comm import pattern
from opensora_cli.parallel.collectives import (
    all_gather_single,
    gather_forward_split_backward,
    reduce_scatter_single,
    split_forward_gather_backward,
)
from opensora_cli.settings.bench_comm import Collective


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation runs."""

    group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.group.size()

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros: timed sums over zeros stay zeros, however often they repeat."""
        return torch.zeros(count, dtype=dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective on buffers of one size."""

    size_bytes: int
    """By the convention of nccl-tests."""
    dtype: torch.dtype
    run: Callable[[], object]
    """Once, on buffers of zeros."""
    count_wrong: Callable[[], int]
    """Runs it on numbers that depend on the rank, and returns how many elements of this rank's result are wrong."""


Build = Callable[[Place, int, torch.dtype], Operation]


def bus_factor(collective: Collective, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth (NVIDIA, nccl-tests, doc/PERFORMANCE.md)."""
    if collective is Collective.ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if collective in (Collective.BROADCAST, Collective.SEND_RECV):
        return 1.0
    return (ranks - 1) / ranks


def all_reduce(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Sum over all ranks, in place."""
    values = place.empty(_whole(size_bytes, dtype, 1), dtype)

    def run() -> None:
        dist.all_reduce(values, group=place.group)

    def count_wrong() -> int:
        pattern.fill(values, scale=place.rank + 1)
        run()
        return pattern.count_wrong(values, scale=pattern.sum_of_scales(place.ranks))

    return Operation(values.nbytes, dtype, run, count_wrong)


def all_gather(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Join equal shares of all ranks."""
    whole = place.empty(_whole(size_bytes, dtype, place.ranks), dtype)
    length = whole.numel() // place.ranks
    own = place.empty(length, dtype)

    def run() -> None:
        all_gather_single(whole, own, group=place.group)

    def count_wrong() -> int:
        pattern.fill(own, scale=place.rank + 1, start=place.rank * length)
        run()
        return pattern.count_wrong_pieces(whole, ranks=place.ranks)

    return Operation(whole.nbytes, dtype, run, count_wrong)


def reduce_scatter(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Sum over all ranks, of which each keeps an equal share."""
    whole = place.empty(_whole(size_bytes, dtype, place.ranks), dtype)
    length = whole.numel() // place.ranks
    own = place.empty(length, dtype)

    def run() -> None:
        reduce_scatter_single(own, whole, group=place.group)

    def count_wrong() -> int:
        pattern.fill(whole, scale=place.rank + 1)
        run()
        return pattern.count_wrong(own, scale=pattern.sum_of_scales(place.ranks), start=place.rank * length)

    return Operation(whole.nbytes, dtype, run, count_wrong)


def all_to_all(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Send another equal piece to each rank."""
    sent = place.empty(_whole(size_bytes, dtype, place.ranks), dtype)
    received = torch.zeros_like(sent)
    length = sent.numel() // place.ranks

    def run() -> None:
        dist.all_to_all_single(received, sent, group=place.group)

    def count_wrong() -> int:
        pattern.fill(sent, scale=place.rank + 1)
        run()
        return pattern.count_wrong_pieces(received, ranks=place.ranks, start=place.rank * length)

    return Operation(sent.nbytes, dtype, run, count_wrong)


def broadcast(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Copy what the first rank has to all."""
    values = place.empty(_whole(size_bytes, dtype, 1), dtype)

    def run() -> None:
        dist.broadcast(values, group_src=0, group=place.group)

    def count_wrong() -> int:
        pattern.fill(values, scale=place.rank + 1)
        run()
        return pattern.count_wrong(values, scale=1)

    return Operation(values.nbytes, dtype, run, count_wrong)


def send_recv(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Send to the next rank and receive from the one before, in a ring, all at once."""
    sent = place.empty(_whole(size_bytes, dtype, 1), dtype)
    received = torch.zeros_like(sent)
    rank, ranks = place.rank, place.ranks
    before, after = (dist.get_global_rank(place.group, (rank + step) % ranks) for step in (-1, 1))

    def run() -> None:
        pair = [
            dist.P2POp(dist.isend, sent, after, group=place.group),
            dist.P2POp(dist.irecv, received, before, group=place.group),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    def count_wrong() -> int:
        pattern.fill(sent, scale=rank + 1)
        run()
        return pattern.count_wrong(received, scale=(rank - 1) % ranks + 1)

    return Operation(sent.nbytes, dtype, run, count_wrong)


def gather_split(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Join shares, and backward take the share of the gradient (`gather_forward_split_backward`)."""
    gradient = place.empty(_whole(size_bytes, dtype, place.ranks), dtype)
    length = gradient.numel() // place.ranks
    own = place.empty(length, dtype).requires_grad_()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        whole = gather_forward_split_backward(own, 0, place.group)
        return whole.detach(), torch.autograd.grad(whole, own, gradient)[0]

    def count_wrong() -> int:
        pattern.fill(gradient, scale=place.rank + 1)
        pattern.fill(own.detach(), scale=place.rank + 1, start=place.rank * length)
        whole, back = run()
        wrong = pattern.count_wrong_pieces(whole, ranks=place.ranks)
        return wrong + pattern.count_wrong(back, scale=place.rank + 1, start=place.rank * length)

    return Operation(gradient.nbytes, dtype, run, count_wrong)


def split_gather(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Take the own share, and backward join the gradients of all (`split_forward_gather_backward`)."""
    whole = place.empty(_whole(size_bytes, dtype, place.ranks), dtype).requires_grad_()
    length = whole.numel() // place.ranks
    gradient = place.empty(length, dtype)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        own = split_forward_gather_backward(whole, 0, place.group)
        return own.detach(), torch.autograd.grad(own, whole, gradient)[0]

    def count_wrong() -> int:
        start = place.rank * length
        pattern.fill(whole.detach(), scale=1)
        pattern.fill(gradient, scale=place.rank + 1, start=start)
        own, back = run()
        return pattern.count_wrong(own, scale=1, start=start) + pattern.count_wrong_pieces(back, ranks=place.ranks)

    return Operation(whole.nbytes, dtype, run, count_wrong)


BUILDERS: Mapping[Collective, Build] = {
    Collective.ALL_REDUCE: all_reduce,
    Collective.ALL_GATHER: all_gather,
    Collective.REDUCE_SCATTER: reduce_scatter,
    Collective.ALL_TO_ALL: all_to_all,
    Collective.BROADCAST: broadcast,
    Collective.SEND_RECV: send_recv,
    Collective.GATHER_SPLIT: gather_split,
    Collective.SPLIT_GATHER: split_gather,
}
"""How each collective that has sizes is made ready: place, size in bytes, dtype."""

BUFFERS = 4
"""Sizes that the hungriest of them holds at once: two of buffers, and what the backward makes."""


def _whole(size_bytes: int, dtype: torch.dtype, ranks: int) -> int:
    """Return the number of elements of a size that all ranks can divide."""
    return max(size_bytes // dtype.itemsize // ranks, 1) * ranks
