"""Collectives that are measured: buffers, one run, and a check with numbers that depend on the rank.

Sizes follow nccl-tests: what one rank sends or receives as a whole. For all-gather and reduce-scatter that is the
array of all ranks. A size is rounded down to whole elements for every rank, but to at least one.

For the check, the element at index i that rank r writes is (i mod 31 + 1)(r + 1), so that a wrong element is found
exactly. Sums over ranks stay exact in float32 up to a thousand ranks, and so do moved values in any dtype, since both
sides round alike.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from opensora_cli.parallel.collectives import (
    Exchange,
    all_gather_single,
    exchange_directly,
    reduce_scatter_single,
)
from opensora_cli.parallel.exchanges import TwoStages, compressed, to_wire, unpacked
from opensora_cli.parallel.shares import Parts, WireFormat
from opensora_cli.settings.tools import Collective

_PERIOD = 31
_ROW = 128
"""Elements that share a scale: the head size of the released model."""
_ON_WIRE = {Collective.ALL_TO_ALL_BF16: 2 / 4, Collective.ALL_TO_ALL_FP8: (_ROW + 4) / (4 * _ROW)}
"""Bytes sent for each byte of fp32."""
_CHUNK = 1 << 22
"""Elements made at a time, so that checking 1 GiB needs no other GiB."""


@dataclass(frozen=True, slots=True)
class Place:
    """Group and device of an operation."""

    group: dist.ProcessGroup
    device: torch.device
    two_stages: TwoStages | None = None
    """Hierarchical exchange. None if the ranks do not divide into equal parts of several ranks."""

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """Number of ranks in the group."""
        return self.group.size()

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros: timed sums over zeros stay zeros, however often they repeat."""
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


Build = Callable[[Place, int, torch.dtype], Operation]


def bus_factor(collective: Collective, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth (NVIDIA, nccl-tests, doc/PERFORMANCE.md)."""
    if collective is Collective.ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if collective in (Collective.BROADCAST, Collective.SEND_RECV):
        return 1.0
    # Compressed ones put less on the wire than their size is.
    return (ranks - 1) / ranks * _ON_WIRE.get(collective, 1.0)


def _operation(
    place: Place,
    filled: torch.Tensor,
    run: Callable[[], Any],
    *,
    start: int = 0,
    wrong: Callable[[Any], int],
    sized: torch.Tensor | None = None,
) -> Operation:
    """Return an operation of the size of `sized`, or of `filled`.

    `filled` is the tensor that this rank writes its numbers into, and `start` the index of its first element. `wrong`
    counts wrong elements, of the result of `run` too.
    """

    def count_wrong() -> int:
        fill(filled, scale=place.rank + 1, start=start)
        return wrong(run())

    sized = filled if sized is None else sized
    return Operation(sized.nbytes, sized.dtype, run, count_wrong)


def _whole_and_own(place: Place, size_bytes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a tensor of all ranks, an equal share of it, and the index of this rank's share in the whole."""
    whole = place.empty(_whole(size_bytes, dtype, place.ranks), dtype)
    length = whole.numel() // place.ranks
    return whole, place.empty(length, dtype), place.rank * length


def all_reduce(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Sum over all ranks, in place."""
    values, scale = place.empty(_whole(size_bytes, dtype, 1), dtype), sum_of_scales(place.ranks)
    run = partial(dist.all_reduce, values, group=place.group)
    return _operation(place, values, run, wrong=lambda _: count_mismatches(values, scale=scale))


def all_gather(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Join equal shares of all ranks."""
    whole, own, start = _whole_and_own(place, size_bytes, dtype)
    run = partial(all_gather_single, whole, own, group=place.group)
    wrong = partial(count_mismatches_of_pieces, whole, ranks=place.ranks)
    return _operation(place, own, run, start=start, wrong=lambda _: wrong(), sized=whole)


def reduce_scatter(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Sum over all ranks, of which each keeps an equal share."""
    whole, own, start = _whole_and_own(place, size_bytes, dtype)
    run = partial(reduce_scatter_single, own, whole, group=place.group)
    wrong = partial(count_mismatches, own, scale=sum_of_scales(place.ranks), start=start)
    return _operation(place, whole, run, wrong=lambda _: wrong())


def all_to_all(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Send another equal piece to each rank."""
    sent, _, start = _whole_and_own(place, size_bytes, dtype)
    received = torch.zeros_like(sent)
    run = partial(dist.all_to_all_single, received, sent, group=place.group)
    wrong = partial(count_mismatches_of_pieces, received, ranks=place.ranks, start=start)
    return _operation(place, sent, run, wrong=lambda _: wrong())


def hierarchical(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Do as `all_to_all`, in two stages, which the place must have."""
    assert place.two_stages is not None
    return _exchange(place, place.two_stages, None, size_bytes, dtype)


def compressed_all_to_all(wire: WireFormat, place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Do as `all_to_all`, with elements that are rounded on the way; each arrives as one process would round it."""
    return _exchange(place, partial(exchange_directly, place.group), wire, size_bytes, dtype)


def _exchange(
    place: Place, exchange: Exchange, wire: WireFormat | None, size_bytes: int, dtype: torch.dtype
) -> Operation:
    row = _ROW if wire == "fp8" else 1
    sent = place.empty(_whole(size_bytes, dtype, place.ranks * row), dtype)
    length = sent.numel() // place.ranks
    parts = Parts(length, (1,) * place.ranks, (1,) * place.ranks, row)

    def wrong(received: torch.Tensor) -> int:
        count = 0
        for source, piece in enumerate(received.view(place.ranks, -1)):
            expected = torch.empty_like(piece)
            fill(expected, scale=source + 1, start=place.rank * length)
            if wire is not None:
                alone = Parts(length, (1,), (1,), row)
                expected = unpacked(to_wire(expected, alone, wire), alone, wire, dtype=dtype)
            count += int((piece != expected).sum())
        return count

    return _operation(place, sent, partial(compressed, exchange, wire, sent, parts), wrong=wrong)


def broadcast(place: Place, size_bytes: int, dtype: torch.dtype) -> Operation:
    """Copy what the first rank has to all."""
    values = place.empty(_whole(size_bytes, dtype, 1), dtype)
    run = partial(dist.broadcast, values, group_src=0, group=place.group)
    return _operation(place, values, run, wrong=lambda _: count_mismatches(values, scale=1))


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

    scale = (rank - 1) % ranks + 1
    return _operation(place, sent, run, wrong=lambda _: count_mismatches(received, scale=scale))


BUILDERS: Mapping[Collective, Build] = {
    Collective.ALL_REDUCE: all_reduce,
    Collective.ALL_GATHER: all_gather,
    Collective.REDUCE_SCATTER: reduce_scatter,
    Collective.ALL_TO_ALL: all_to_all,
    Collective.HIERARCHICAL: hierarchical,
    Collective.ALL_TO_ALL_BF16: partial(compressed_all_to_all, "bf16"),
    Collective.ALL_TO_ALL_FP8: partial(compressed_all_to_all, "fp8"),
    Collective.BROADCAST: broadcast,
    Collective.SEND_RECV: send_recv,
}
"""Builder of each collective that has sizes. Arguments: place, size in bytes, dtype."""

BUFFERS = 4
"""Buffers of the measured size that a collective holds at most: two, and those of a compressed exchange."""


def _whole(size_bytes: int, dtype: torch.dtype, ranks: int) -> int:
    """Return the number of elements of a size that all ranks can divide."""
    return max(size_bytes // dtype.itemsize // ranks, 1) * ranks


def fill(values: torch.Tensor, *, scale: int, start: int = 0) -> None:
    """Write the pattern into a contiguous tensor, in its dtype.

    `scale` is rank + 1, or the sum of that over ranks; `start` is the index of the first element.
    """
    for part, expected in _chunks(values, scale=scale, start=start):
        part.copy_(expected)


def count_mismatches(values: torch.Tensor, *, scale: int, start: int = 0) -> int:
    """Return how many elements of a contiguous tensor are not those of `fill`."""
    return sum(int((part != expected).sum()) for part, expected in _chunks(values, scale=scale, start=start))


def count_mismatches_of_pieces(values: torch.Tensor, *, ranks: int, start: int | None = None) -> int:
    """Return how many elements are wrong where equal pieces come from all ranks in order; piece r has the scale r + 1.

    `start` is the index of the first element of every piece. None means its place in the whole.
    """
    pieces = values.view(ranks, -1)
    length = pieces.shape[1]
    return sum(
        count_mismatches(piece, scale=rank + 1, start=rank * length if start is None else start)
        for rank, piece in enumerate(pieces)
    )


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
