"""Ulysses attention (Jacobs et al. 2023): between its ranks, tokens are exchanged for heads and back."""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.core.attention import AttentionFn
from opensora_cli.core.exceptions import RequestError
from opensora_cli.parallel.shares import SequenceLengths, shares


class UlyssesAttention:
    """Self-attention over tokens that are divided between ranks: each computes some of the heads for all tokens.

    Any number of tokens on each rank (`lengths.of_ulysses`) and any number of heads will do, if there is a head for
    each; nothing is padded. There are two exchanges, one of q, k and v at once and one of the result, as many again
    backward. With a `RingAttention` between the other ranks of the sequence as `attention`, this is the two-dimensional
    scheme of Fang & Zhao 2024 (USP).
    """

    def __init__(self, attention: AttentionFn, group: dist.ProcessGroup, lengths: SequenceLengths) -> None:
        self._attention = attention
        self._group = group
        self._lengths = lengths

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
        q, k, v = _exchange((q_BHND, k_BHND, v_BHND), self._group, (1, heads), (2, lengths))
        (out,) = _exchange((self._attention(q, k, v),), self._group, (2, lengths), (1, heads))
        return out


_Cut = tuple[int, tuple[int, ...]]
"""A dimension, and how many entries along it each rank has."""


def _exchange(tensors: tuple[Tensor, ...], group: dist.ProcessGroup, scatter: _Cut, gather: _Cut) -> tuple[Tensor, ...]:
    if dist.get_world_size(group) == 1:
        return tensors
    exchanged: tuple[Tensor, ...] = _Exchange.apply(group, scatter, gather, *tensors)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """What `all_to_all` does, for several tensors of one shape in one exchange and without a copy that joins them."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, scatter: _Cut, gather: _Cut, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.scatter, ctx.gather = group, scatter, gather
        (dim, sizes), count = scatter, len(tensors)
        of_ranks = list(zip(*(torch.split(tensor, list(sizes), dim) for tensor in tensors), strict=True))
        sent = _packed(of_ranks)
        lengths = [count * pieces[0].numel() for pieces in of_ranks]

        dim, sizes = gather
        shapes = [[count, *of_ranks[dist.get_rank(group)][0].shape] for _ in sizes]
        for shape, size in zip(shapes, sizes, strict=True):
            shape[1 + dim] = size
        expected = [prod(shape) for shape in shapes]
        received = sent.new_empty(sum(expected))
        dist.all_to_all_single(received, sent, expected, lengths, group=group)
        del sent
        parts = [part.view(shape) for part, shape in zip(torch.split(received, expected), shapes, strict=True)]
        return tuple(torch.cat([part[index] for part in parts], dim) for index in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_exchange(gradients, ctx.group, ctx.gather, ctx.scatter)


def _packed(of_ranks: list[tuple[Tensor, ...]]) -> Tensor:
    pieces = [piece for pieces in of_ranks for piece in pieces]
    packed = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    for place, piece in zip(torch.split(packed, [piece.numel() for piece in pieces]), pieces, strict=True):
        place.view(piece.shape).copy_(piece)
    return packed
