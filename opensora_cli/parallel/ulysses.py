"""Ulysses attention (Jacobs et al. 2023): ranks exchange tokens for heads, and back."""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.core.attention import AttentionFn
from opensora_cli.core.exceptions import RequestError
from opensora_cli.parallel.all_to_all import (
    Direct,
    ExchangePlan,
    Route,
    compressed,
    to_wire,
    unpacked,
    wire_parts,
)
from opensora_cli.parallel.collectives import Exchange, Parts
from opensora_cli.parallel.scheduling import BandwidthMonitor, CommunicationScheduler, Handle
from opensora_cli.parallel.shares import SequenceLengths, shares


class UlyssesAttention:
    """Self-attention over tokens that are divided between ranks: each computes some of the heads for all tokens.

    Each rank may have any number of tokens (`lengths.of_ulysses`), and any number of heads works if there is one for
    each rank; nothing is padded. There are two exchanges, one of q, k and v together and one of the result, and two
    more in backward. With a `RingAttention` between the other ranks of the sequence as `attention`, this is the
    two-dimensional scheme of Fang & Zhao 2024 (USP).

    Args:
        plan: plan of the exchanges. With `chunks` over 1 and without gradients, the heads of a rank are exchanged in
            that number of parts, each while attention of the previous one is computed. Then only the exchanges of the
            first q, k, v and of the last result cause waits.
        route: result of `open_route` for `plan`. None means that every rank sends to every other.
    """

    def __init__(
        self,
        attention: AttentionFn,
        group: dist.ProcessGroup,
        lengths: SequenceLengths,
        *,
        plan: ExchangePlan | None = None,
        route: Route | None = None,
    ) -> None:
        self._attention = attention
        self._group = group
        self._lengths = lengths
        self._plan = plan or ExchangePlan()
        self._route = route or Direct(group)
        self._exchange: Exchange = partial(compressed, self._route, self._plan.wire)
        self._scheduler: CommunicationScheduler | None = None
        if isinstance(self._route, Direct) and self._plan.chunks > 1:
            self._scheduler = CommunicationScheduler(group, self._route.monitor or BandwidthMonitor())

    def __call__(self, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, /) -> Tensor:
        """Return attention of this rank's queries to the keys of all ranks, (B, H, N, D).
        Raises RequestError if there are fewer heads than ranks, and ValueError if q, k and v do not have one shape, or
        not as many tokens as `lengths` says.
        """
        lengths, ranks, rank = self._lengths.of_ulysses, dist.get_world_size(self._group), dist.get_rank(self._group)
        num_heads = q_BHND.shape[1]
        if num_heads < ranks:
            raise RequestError(f"ulysses_degree={ranks} is over the {num_heads} heads: use at most {num_heads}")
        if not q_BHND.shape == k_BHND.shape == v_BHND.shape or q_BHND.shape[2] != lengths[rank]:
            raise ValueError(f"q, k and v of rank {rank} should have {lengths[rank]} tokens: {q_BHND.shape}")
        heads = shares(num_heads, ranks)
        given = q_BHND, k_BHND, v_BHND
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        if self._scheduler is not None and not needs_gradient and ranks > 1:
            return self._overlapped(self._scheduler, given, heads, lengths)
        q, k, v = self._exchanged(given, (1, heads), (2, lengths))
        (out,) = self._exchanged((self._attention(q, k, v),), (2, lengths), (1, heads))
        return out

    def _exchanged(self, tensors: tuple[Tensor, ...], scatter: "_Cut", gather: "_Cut") -> tuple[Tensor, ...]:
        if dist.get_world_size(self._group) == 1:
            return tensors
        rank = dist.get_rank(self._group)
        exchanged: tuple[Tensor, ...] = _Exchange.apply(self._exchange, rank, scatter, gather, *tensors)  # type: ignore[no-untyped-call]
        return exchanged

    def _overlapped(
        self,
        scheduler: CommunicationScheduler,
        given: tuple[Tensor, ...],
        heads: tuple[int, ...],
        lengths: tuple[int, ...],
    ) -> Tensor:
        """Compute `__call__` in chunks: each overlaps with receiving the next chunk and sending the previous result."""
        chunks = min(self._plan.chunks, min(heads))
        # The piece of rank r and chunk c has the index r * chunks + c.
        pieces = [part for of_rank in heads for part in shares(of_rank, chunks)]
        split = [torch.split(tensor, pieces, 1) for tensor in given]

        def submit(index: int) -> _Coming:
            own = [tuple(torch.cat(of_tensor[index::chunks], 1) for of_tensor in split)]
            return self._submit(scheduler, own[0], (1, tuple(pieces[index::chunks])), (2, lengths))

        coming, results = submit(0), list[_Coming]()
        for index in range(chunks):
            scheduler.flush()
            now = coming
            if index + 1 < chunks:
                coming = submit(index + 1)
            q, k, v = now.wait()
            # Issue the next chunk and the previous result before attention.
            scheduler.flush()
            out = self._attention(q, k, v)
            results.append(self._submit(scheduler, (out,), (2, lengths), (1, tuple(pieces[index::chunks]))))
            del q, k, v, now, out
        scheduler.flush()
        outs = [torch.split(result.wait()[0], pieces[index::chunks], 1) for index, result in enumerate(results)]
        return torch.cat([of_chunk[rank] for rank in range(len(heads)) for of_chunk in outs], 1)

    def _submit(
        self, scheduler: CommunicationScheduler, tensors: tuple[Tensor, ...], scatter: "_Cut", gather: "_Cut"
    ) -> "_Coming":
        assert isinstance(self._route, Direct)
        layout = _Layout(tensors, dist.get_rank(self._group), scatter, gather)
        sent, wire = layout.packed(tensors), self._plan.wire
        on_wire = sent if wire is None else to_wire(sent, layout.parts, wire)
        received, start = self._route.begin(on_wire, wire_parts(layout.parts, wire))
        # `start`, which the handle holds, keeps the sent tensor alive.
        return _Coming(scheduler.submit(start, received, group=self._group), layout, self._plan, sent.dtype)


_Cut = tuple[int, tuple[int, ...]]
"""Dimension, and number of entries of each rank along it."""


class _Layout:
    """Layout of several tensors of one shape in a flat one, which exchanges all of them without an additional copy."""

    def __init__(self, tensors: tuple[Tensor, ...], rank: int, scatter: _Cut, gather: _Cut) -> None:
        self._scatter, self._gather, self._count = scatter, gather, len(tensors)
        shape = list(tensors[0].shape)
        shape[scatter[0]] = scatter[1][rank]
        shape[gather[0]] = 1
        self._shape = shape
        others = torch.Size(size for dim, size in enumerate(shape) if dim not in (scatter[0], gather[0])).numel()
        self.parts = Parts(self._count * others, gather[1], scatter[1], row=shape[-1])

    def packed(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return the flat tensor to send, with the pieces of all tensors for each rank."""
        dim, sizes = self._scatter
        of_ranks = zip(*(torch.split(tensor, list(sizes), dim) for tensor in tensors), strict=True)
        pieces = [piece for of_rank in of_ranks for piece in of_rank]
        packed: Tensor = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
        for place, piece in zip(torch.split(packed, [piece.numel() for piece in pieces]), pieces, strict=True):
            place.view(piece.shape).copy_(piece)
        return packed

    def joined(self, received: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors from the received flat tensor."""
        dim, sizes = self._gather
        shapes = [[self._count, *self._shape] for _ in sizes]
        for shape, size in zip(shapes, sizes, strict=True):
            shape[1 + dim] = size
        flats = torch.split(received, [torch.Size(shape).numel() for shape in shapes])
        parts = [flat.view(shape) for flat, shape in zip(flats, shapes, strict=True)]
        return tuple(torch.cat([part[index] for part in parts], dim) for index in range(self._count))


class _Coming(NamedTuple):
    """Tensors of an exchange that is running or queued."""

    handle: Handle
    layout: _Layout
    plan: ExchangePlan
    dtype: torch.dtype

    def wait(self) -> tuple[Tensor, ...]:
        received, wire = self.handle.wait(), self.plan.wire
        if wire is not None:
            received = unpacked(received, self.layout.parts, wire, dtype=self.dtype)
        return self.layout.joined(received)


class _Exchange(torch.autograd.Function):
    """Function like `all_to_all` for several tensors of one shape in one exchange."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, rank: int, scatter: _Cut, gather: _Cut, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.rank, ctx.scatter, ctx.gather = exchange, rank, scatter, gather
        layout = _Layout(tensors, rank, scatter, gather)
        return layout.joined(exchange(layout.packed(tensors), layout.parts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        back = _Exchange.apply(ctx.exchange, ctx.rank, ctx.gather, ctx.scatter, *gradients)  # type: ignore[no-untyped-call]
        return None, None, None, None, *back
