"""Ulysses attention (Jacobs et al. 2023): ranks exchange tokens for heads, and back."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.core.attention import AttentionFn
from opensora_cli.core.exceptions import RequestError
from opensora_cli.parallel.collectives import Cut, Exchange, Layout, as_bytes, exchange_all, exchange_directly
from opensora_cli.parallel.exchanges import TwoStages, compressed, to_wire, unpacked
from opensora_cli.parallel.shares import ExchangePlan, SequenceLengths, shares


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
        stages: result of `open_stages` for `plan`.
    """

    def __init__(
        self,
        attention: AttentionFn,
        group: dist.ProcessGroup,
        lengths: SequenceLengths,
        *,
        plan: ExchangePlan | None = None,
        stages: TwoStages | None = None,
    ) -> None:
        self._attention = attention
        self._group = group
        self._lengths = lengths
        self._plan = plan or ExchangePlan()
        self._is_overlapped = stages is None and self._plan.chunks > 1
        self._exchange: Exchange = partial(compressed, stages or partial(exchange_directly, group), self._plan.wire)

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
        if ranks == 1:
            return self._attention(q_BHND, k_BHND, v_BHND)
        heads, given = shares(num_heads, ranks), (q_BHND, k_BHND, v_BHND)
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        if self._is_overlapped and not needs_gradient:
            return self._overlapped(given, heads, lengths)
        q, k, v = exchange_all(self._exchange, rank, (1, heads), (2, lengths), *given)
        (out,) = exchange_all(self._exchange, rank, (2, lengths), (1, heads), self._attention(q, k, v))
        return out

    def _overlapped(self, given: tuple[Tensor, ...], heads: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
        """Compute `__call__` in chunks: each overlaps with receiving the next chunk and sending the previous result."""
        chunks = min(self._plan.chunks, min(heads))
        # The piece of rank r and chunk c has the index r * chunks + c.
        pieces = [part for of_rank in heads for part in shares(of_rank, chunks)]
        split = [torch.split(tensor, pieces, 1) for tensor in given]

        def begin(index: int) -> _Running:
            tensors = tuple(torch.cat(of_tensor[index::chunks], 1) for of_tensor in split)
            return self._begin(tensors, (1, tuple(pieces[index::chunks])), (2, lengths))

        coming, results = begin(0), list[_Running]()
        for index in range(chunks):
            q, k, v = coming.wait()
            if index + 1 < chunks:
                coming = begin(index + 1)
            out = self._attention(q, k, v)
            results.append(self._begin((out,), (2, lengths), (1, tuple(pieces[index::chunks]))))
            del q, k, v, out
        outs = [torch.split(result.wait()[0], pieces[index::chunks], 1) for index, result in enumerate(results)]
        return torch.cat([of_chunk[rank] for rank in range(len(heads)) for of_chunk in outs], 1)

    def _begin(self, tensors: tuple[Tensor, ...], scatter: Cut, gather: Cut) -> "_Running":
        rank = dist.get_rank(self._group)
        return _Running(Layout(tensors, rank, scatter, gather), tensors, self._group, self._plan)


class _Running:
    """Exchange of tensors that is running."""

    def __init__(
        self, layout: Layout, tensors: tuple[Tensor, ...], group: dist.ProcessGroup, plan: ExchangePlan
    ) -> None:
        self._layout, self._wire, self._dtype = layout, plan.wire, tensors[0].dtype
        parts, rank = layout.parts.on_wire(plan.wire), dist.get_rank(group)
        sent = layout.pack(tensors)
        # The sent tensor must stay alive until the end of the exchange.
        self._sent = sent if plan.wire is None else to_wire(sent, layout.parts, plan.wire)
        expected = parts.received(rank)
        self._received = self._sent.new_empty(sum(expected))
        self._work = dist.all_to_all_single(
            as_bytes(self._received), as_bytes(self._sent), expected, parts.sent(rank), group=group, async_op=True
        )

    def wait(self) -> tuple[Tensor, ...]:
        """Return the received tensors."""
        self._work.wait()
        if self._wire is None:
            return self._layout.unpack(self._received)
        return self._layout.unpack(unpacked(self._received, self._layout.parts, self._wire, dtype=self._dtype))
