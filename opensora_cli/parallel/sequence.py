"""Sequence parallelism: ranks divide the tokens of a sample, and only attention connects their shares."""

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor

from opensora_cli.core.attention import AttentionFn
from opensora_cli.core.exceptions import RequestError
from opensora_cli.parallel.collectives import (
    Exchange,
    copy_to_group,
    gather_forward_split_backward,
    split_forward_gather_backward,
)
from opensora_cli.parallel.mesh import ParallelMesh
from opensora_cli.parallel.ring import RingAttention
from opensora_cli.parallel.shares import SequenceLengths, shares
from opensora_cli.parallel.ulysses import UlyssesAttention


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
