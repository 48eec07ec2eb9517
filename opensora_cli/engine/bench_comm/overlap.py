"""Exchanges while attention computes: what of them is still waited for, in time and in bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.core.documents import Document
from opensora_cli.engine.bench_comm.operations import Place
from opensora_cli.engine.bench_comm.shapes import DTYPE, ModelShapes
from opensora_cli.engine.bench_comm.timing import Repeats, measure
from opensora_cli.models.attention.sdpa import sdpa
from opensora_cli.parallel.all_to_all import Direct, ExchangePlan
from opensora_cli.parallel.collectives import Parts
from opensora_cli.parallel.scheduling import BandwidthMonitor
from opensora_cli.parallel.shares import SequenceLengths, shares
from opensora_cli.parallel.ulysses import UlyssesAttention
from opensora_cli.settings.enums import Collective

CHUNKS = (1, 2, 4)
_QKV = 3


class OverlapRow(Document):
    """Ulysses attention of one block, its heads exchanged in so many chunks (`parallel.ulysses_chunks`)."""

    chunks: int
    tokens: int
    """Of all ranks."""
    total_s: float
    """Mean time of exchanges and attention."""
    compute_s: float
    """Of attention alone."""
    exposed_s: float
    """What the exchanges add to that."""
    sent_bytes: int
    """By all ranks, counted."""
    exposed_bytes: int
    """Of these, in exchanges during which no attention was computed."""
    exchange_gb_per_s: float | None = None
    """What rank 0 sends in an exchange that nothing overlaps with, as training's log has it; None: all overlap."""
    slow_exchanges: int = 0
    """Those that took over five times as long as the ones before let expect."""

    def line(self) -> str:
        """Return it for people."""
        chunks = f"{self.chunks} chunk{'s' if self.chunks > 1 else ''} of heads"
        share = self.exposed_bytes / self.sent_bytes
        rate = "" if self.exchange_gb_per_s is None else f"; {self.exchange_gb_per_s:.3f} GB/s"
        slow = f", {self.slow_exchanges} slow" if self.slow_exchanges else ""
        return (
            f"{chunks}: {self.total_s * 1e6:.0f} us, of which {self.exposed_s * 1e6:.0f} us wait for exchanges; "
            f"{share:.0%} of {self.sent_bytes} bytes exposed{rate}{slow}"
        )


@dataclass(slots=True)
class _Exposure:
    """What was sent, and what of it while no attention was computed."""

    sent: int = 0
    exposed: int = 0
    computed: int = 0
    """Calls of attention so far."""


@dataclass(frozen=True, slots=True)
class _Observed(Direct):
    """The direct exchange, counted."""

    exposure: _Exposure = field(default_factory=_Exposure)

    def __call__(self, sent: Tensor, parts: Parts, /) -> Tensor:
        nbytes = self._leaving(sent, parts)
        self.exposure.sent += nbytes
        self.exposure.exposed += nbytes
        # Not super(): a dataclass with slots is another class than the one that the compiler knows.
        return Direct.__call__(self, sent, parts)

    def begin(self, sent: Tensor, parts: Parts) -> tuple[Tensor, Callable[[], Any]]:
        received, start = Direct.begin(self, sent, parts)
        return received, partial(_ObservedWork, start, self.exposure, self._leaving(sent, parts))

    def _leaving(self, sent: Tensor, parts: Parts) -> int:
        rank = dist.get_rank(self.group)
        return (sent.numel() - parts.length(rank, rank)) * sent.itemsize


class _ObservedWork:
    """An exchange that is under way."""

    def __init__(self, start: Callable[[], dist.Work], exposure: _Exposure, nbytes: int) -> None:
        self._exposure, self._nbytes, self._since = exposure, nbytes, exposure.computed
        exposure.sent += nbytes
        self._work: dist.Work | None = start()

    def wait(self) -> None:
        """Wait for it."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._exposure.exposed += self._nbytes if self._since == self._exposure.computed else 0


def measure_overlap(place: Place, model: ModelShapes, *, largest_bytes: int, repeats: Repeats) -> list[OverlapRow]:
    """Return a row for each number of chunks; all ranks of the group call this.

    The shape is that of the released model at 256px, with fewer tokens where q, k and v would exceed `largest_bytes`.
    """
    rank, ranks = place.rank, place.ranks
    a_token = _QKV * model.num_heads * model.head_dim * DTYPE.itemsize
    tokens = max(min(model.tokens[Collective.ULYSSES_256PX], largest_bytes // a_token * ranks), ranks)
    lengths = SequenceLengths(ring=1, ulysses=ranks, ring_rank=0)
    lengths.of_ranks = shares(tokens, ranks)
    own = torch.zeros(1, model.num_heads, lengths.of_ranks[rank], model.head_dim, dtype=DTYPE, device=place.device)
    heads = shares(model.num_heads, ranks)
    whole = torch.zeros(1, heads[rank], tokens, model.head_dim, dtype=DTYPE, device=place.device)
    with torch.no_grad():
        compute, _ = measure(partial(sdpa, whole, whole, whole), repeats, device=place.device, group=place.group)
        fitting = [chunks for chunks in CHUNKS if chunks <= min(heads)]
        return [_row(place, own, lengths, chunks, compute.avg_s, repeats) for chunks in fitting]


def _row(
    place: Place, own: Tensor, lengths: SequenceLengths, chunks: int, compute_s: float, repeats: Repeats
) -> OverlapRow:
    exposure, monitor = _Exposure(), BandwidthMonitor()

    def attention(q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        exposure.computed += 1
        return sdpa(q, k, v)

    route = _Observed(place.group, monitor, exposure)
    ulysses = UlyssesAttention(attention, place.group, lengths, plan=ExchangePlan(chunks=chunks), route=route)
    ulysses(own, own, own)
    counted = torch.tensor([exposure.sent, exposure.exposed], dtype=torch.int64, device=place.device)
    dist.all_reduce(counted, group=place.group)
    sent, exposed = counted.tolist()
    monitor.take()
    times, _ = measure(lambda: ulysses(own, own, own), repeats, device=place.device, group=place.group)
    rates, slow = monitor.take()
    rate: Sequence[float] = list(rates.values())
    return OverlapRow(
        chunks=chunks,
        tokens=sum(lengths.of_ranks),
        total_s=times.avg_s,
        compute_s=compute_s,
        exposed_s=max(times.avg_s - compute_s, 0.0),
        sent_bytes=sent,
        exposed_bytes=exposed,
        exchange_gb_per_s=rate[0] / 1e9 if rate else None,
        slow_exchanges=len(slow),
    )
