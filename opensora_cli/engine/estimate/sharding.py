"""What one of several ranks needs of memory for its share of the tokens; nothing is sent."""

from functools import partial

import torch
from torch import Tensor

from opensora_cli.core.attention import AttentionFn, accumulation_dtype
from opensora_cli.models.attention.sdpa import sdpa
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.models.mmdit.blocks import SEQUENCE_INPUTS, TEXT_SEQUENCE_INPUTS
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.parallel.shares import shares


class EmptySequenceParallel:
    """Allocates what `SequenceParallel` does on a rank with the most tokens; to be called inside `without_memory`.

    Args:
        model: has the attention of `empty_attention`.
        mesh: says how many share the tokens.
    """

    def __init__(self, model: MMDiT, mesh: MeshShape) -> None:
        self._model = model
        self._ranks = mesh.ring * mesh.ulysses

    def __call__(self, packed_latents_BND: Tensor, /, **inputs: Tensor | None) -> Tensor:
        """Return the velocity of all tokens; see `MMDiT.forward`."""
        share = self._cut(packed_latents_BND, 1)
        dims = SEQUENCE_INPUTS | TEXT_SEQUENCE_INPUTS
        cut = {
            name: self._cut(value, dims[name]) if value is not None and name in dims else value
            for name, value in inputs.items()
        }
        velocity: Tensor = self._model(share, **cut)
        return velocity if self._ranks == 1 else torch.empty_like(packed_latents_BND)

    def _cut(self, whole: Tensor, dim: int) -> Tensor:
        if self._ranks == 1:
            return whole
        return whole.narrow(dim, 0, shares(whole.shape[dim], self._ranks)[0]).clone()


def empty_attention(mesh: MeshShape) -> AttentionFn:
    """Return what allocates what the attention between ranks does (`UlyssesAttention`, `RingAttention`)."""
    attention = sdpa if mesh.ring == 1 else _round_the_ring
    return attention if mesh.ulysses == 1 else partial(_for_heads, attention, mesh.ulysses)


def _for_heads(attention: AttentionFn, ranks: int, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, /) -> Tensor:
    batch, heads, tokens, width = q_BHND.shape
    shape = batch, shares(heads, ranks)[0], tokens * ranks, width
    q, k, v = _exchanged([q_BHND, k_BHND, v_BHND], shape)
    (out,) = _exchanged([attention(q, k, v)], q_BHND.shape)
    return out


def _exchanged(tensors: list[Tensor], shape: tuple[int, ...]) -> list[Tensor]:
    sent = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    received = sent.new_empty(len(tensors), *shape)
    del sent
    return [part.clone() for part in received]


def _round_the_ring(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, /) -> Tensor:
    # Those that came, and those on their way.
    coming = [torch.empty_like(tensor) for tensor in (k_BHND, v_BHND, k_BHND, v_BHND)]
    out = torch.empty_like(q_BHND, dtype=accumulation_dtype(q_BHND.dtype))
    part = sdpa(q_BHND, *coming[:2])
    out.lerp_(part.to(out.dtype), 0.5)
    del part, coming
    return out.to(q_BHND.dtype)
