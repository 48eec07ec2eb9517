"""Sequence parallelism: ranks divide the tokens of a sample, and only attention connects their shares.

Between ranks, attention is a ring, Ulysses attention (Jacobs et al. 2023), in which ranks exchange tokens for heads and
back, or both. For slow links, the exchange has two stages, inside machines and between them, or rounded elements.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.core.attention import AttentionFn
from opensora_cli.core.exceptions import RequestError
from opensora_cli.parallel.collectives import (
    Exchange,
    copy_to_group,
    exchange_all,
    exchange_directly,
    exchange_flat,
    gather_forward_split_backward,
    split_forward_gather_backward,
)
from opensora_cli.parallel.mesh import ParallelMesh
from opensora_cli.parallel.ring import RingAttention
from opensora_cli.parallel.shares import SCALE_BYTES, ExchangePlan, Parts, SequenceLengths, WireFormat, shares

_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class TwoStages:
    """`Exchange` of the ranks of several machines, which are numbered machine by machine.

    Each rank sends its parts for place p of any machine to place p of its own machine, which sends every machine one
    message with the parts of all its ranks. So between M machines of L ranks, each rank sends M - 1 messages, instead
    of L (M - 1) messages with an L-th of the size. Inside a machine, data is sent twice.

    `local_group` has the ranks of this machine, and `node_group` the ranks with this place on every machine.
    """

    local_group: dist.ProcessGroup
    node_group: dist.ProcessGroup

    def __call__(self, sent: Tensor, parts: Parts, /) -> Tensor:
        inner, place = dist.get_world_size(self.local_group), dist.get_rank(self.local_group)
        node, places = dist.get_rank(self.node_group), range(inner)
        nodes = range(dist.get_world_size(self.node_group))

        # Length of the part from one place of one node to another.
        def length(from_node: int, from_place: int, to_node: int, to_place: int) -> int:
            return parts.length(from_node * inner + from_place, to_node * inner + to_place)

        pieces = torch.split(sent, parts.sent(node * inner + place))
        by_place = torch.cat([pieces[n * inner + p] for p in places for n in nodes])
        del sent, pieces
        of_machine = exchange_flat(
            by_place,
            [sum(length(node, place, n, p) for n in nodes) for p in places],
            [sum(length(node, p, n, place) for n in nodes) for p in places],
            self.local_group,
        )
        del by_place
        came = torch.split(of_machine, [length(node, p, n, place) for p in places for n in nodes])
        by_node = torch.cat([came[p * len(nodes) + n] for n in nodes for p in places])
        del of_machine, came
        return exchange_flat(
            by_node,
            [sum(length(node, p, n, place) for p in places) for n in nodes],
            [sum(length(n, p, node, place) for p in places) for n in nodes],
            self.node_group,
        )


def open_exchange(mesh: ParallelMesh, plan: ExchangePlan) -> Exchange:
    """Return the exchange between the Ulysses ranks of a mesh. All ranks of the run must call this."""
    direct = partial(exchange_directly, mesh.group("ulysses"))
    return partial(
        compressed, TwoStages(*mesh.stages("ulysses", inner=plan.inner)) if plan.inner > 1 else direct, plan.wire
    )


def compressed(exchange: Exchange, wire: WireFormat | None, sent: Tensor, parts: Parts) -> Tensor:
    """Exchange parts through `exchange`, with elements rounded to `wire`. None means no rounding.

    The error of an element x of an fp32 tensor is at most |x| / 256 with `bf16`. With `fp8` it is at most |x| / 16, or
    2^-18 of the largest element of its row if that is more; a row is along the last dimension. A row with an infinity
    or NaN arrives as NaN with `fp8`. `bf16` saves nothing for a 16-bit tensor. Raises ValueError like `Parts.on_wire`.
    """
    if wire is None:
        return exchange(sent, parts)
    on_wire = parts.on_wire(wire)
    if wire == "bf16":
        return exchange(sent.to(torch.bfloat16), on_wire).to(sent.dtype)
    values, scales = _quantize(sent.view(-1, parts.row or 1))
    # Values and scales share a message because a second one would cost its latency again.
    rows = torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=-1)
    received = exchange(rows.view(-1), on_wire).view(-1, rows.shape[1])
    values, scales = received[:, :-SCALE_BYTES], received[:, -SCALE_BYTES:].contiguous()
    return (values.view(_FP8).float() * scales.view(torch.float32)).to(sent.dtype).view(-1)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp8 values, and the fp32 scale of each row (..., 1) as a factor for them; the largest value becomes 448.

    Rows are along the last dimension, and have at least one element.
    """
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    # A row of zeros would divide by zero.
    scales = (largest / torch.finfo(_FP8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scales).to(_FP8), scales


class UlyssesAttention:
    """Self-attention over tokens that are divided between ranks: each computes some of the heads for all tokens.

    Each rank may have any number of tokens (`lengths.of_ulysses`), and any number of heads works if there is one for
    each rank; nothing is padded. There are two exchanges, one of q, k and v together and one of the result, and two
    more in backward. With a `RingAttention` between the other ranks of the sequence as `attention`, this is the
    two-dimensional scheme of Fang & Zhao 2024 (USP).

    `exchange` is the result of `open_exchange`. None means that every rank sends to every other.
    """

    def __init__(
        self,
        attention: AttentionFn,
        group: dist.ProcessGroup,
        lengths: SequenceLengths,
        *,
        exchange: Exchange | None = None,
    ) -> None:
        self._attention = attention
        self._group = group
        self._lengths = lengths
        self._exchange: Exchange = exchange or partial(exchange_directly, group)

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
        heads = shares(num_heads, ranks)
        q, k, v = exchange_all(self._exchange, rank, (1, heads), (2, lengths), q_BHND, k_BHND, v_BHND)
        (out,) = exchange_all(self._exchange, rank, (2, lengths), (1, heads), self._attention(q, k, v))
        return out


def sequence_attention(
    attention: AttentionFn,
    mesh: ParallelMesh,
    lengths: SequenceLengths,
    *,
    exchange: Exchange | None = None,
) -> AttentionFn:
    """Return attention between the tokens of all sequence-parallel ranks, to use in a model instead of `attention`.

    Ulysses attention wraps the ring (USP, Fang & Zhao 2024). If both have one rank, the result is `attention` itself.
    `lengths` is shared with the model's `SequenceParallel`. `exchange` is that of `UlyssesAttention`. Raises
    RequestError if there is a ring, and the attention does not compute in parts.
    """
    if mesh.shape.ring > 1:
        attention = RingAttention(attention, mesh.group("ring"), lengths)
    if mesh.shape.ulysses > 1:
        attention = UlyssesAttention(attention, mesh.group("ulysses"), lengths, exchange=exchange)
    return attention


class SequenceParallel:
    """Wrapper of a model that computes with this rank's share of the tokens, with whole inputs and results.

    All ranks of the group call it with the same arguments, and all get the whole result. Its loss counts once: each
    rank's gradients of the weights come from its own tokens, and must be summed over the group; gradients of inputs are
    whole. The model must use the attention of `sequence_attention` with the same `lengths`, and otherwise treat tokens
    separately. The ranks of `group` are ordered by ring place: `mesh.group("ring", "ulysses")`.

    Args:
        sequence_inputs: arguments with one entry per token of the result -> dimension of the tokens. The positional
            argument comes first, and its dimension is also that of the result.
        text_sequence_inputs: arguments with one entry per token of the text -> dimension of the tokens.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        group: dist.ProcessGroup,
        lengths: SequenceLengths,
        *,
        sequence_inputs: Mapping[str, int],
        text_sequence_inputs: Mapping[str, int],
    ) -> None:
        self.model = model
        self._group = group
        self._lengths = lengths
        self._inputs = dict(sequence_inputs)
        self._text_inputs = dict(text_sequence_inputs)

    def __call__(self, tokens: Tensor, /, **inputs: object) -> Tensor:
        """Return `model(tokens, **inputs)`. The names of the arguments are the model's.

        `tokens` is the first of `sequence_inputs`; arguments in neither table are whole on every rank. Raises
        RequestError if there are more ranks than tokens.
        """
        first, dim = next(iter(self._inputs.items()))
        sizes, text_sizes = self._shares(tokens.shape[dim], inputs)
        self._lengths.of_ranks = tuple(map(sum, zip(sizes, text_sizes, strict=True)))
        own: dict[str, object] = {}
        for name, value in {first: tokens, **inputs}.items():
            if not isinstance(value, Tensor):
                own[name] = value
            elif name in self._inputs:
                own[name] = split_forward_gather_backward(value, self._inputs[name], self._group, sizes=sizes)
            elif name in self._text_inputs:
                own[name] = split_forward_gather_backward(value, self._text_inputs[name], self._group, sizes=text_sizes)
            else:
                own[name] = copy_to_group(value, self._group) if value.requires_grad else value
        result = self.model(own.pop(first), **own)
        return gather_forward_split_backward(result, dim, self._group, sizes=sizes)

    def _shares(self, length: int, inputs: Mapping[str, object]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ranks = dist.get_world_size(self._group)
        if length < ranks:
            raise RequestError(
                f"{length} latent tokens cannot be divided between {ranks} ranks: each needs at least one",
                hint=f"ulysses_degree x ring_degree may be {length} at most for a video of this size",
            )
        texts = [(inputs.get(name), dim) for name, dim in self._text_inputs.items()]
        text_length = next((text.shape[dim] for text, dim in texts if isinstance(text, Tensor)), 0)
        # Reversed, so that a rank with one more latent token has one less text token.
        return shares(length, ranks), shares(text_length, ranks)[::-1]
