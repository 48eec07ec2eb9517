"""Attention by parts of the keys, put together as a ring does."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opensora_cli.core.attention import PartKernel
from opensora_cli.core.device import accumulation_dtype
from opensora_cli.parallel.ring import merge


def _pieces(k: Tensor, v: Tensor, cuts: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    parts = zip(k.split(cuts, 2), v.split(cuts, 2), strict=True)
    return [(k_part.contiguous(), v_part.contiguous()) for k_part, v_part in parts]


def merged(kernel: PartKernel, q: Tensor, k: Tensor, v: Tensor, cuts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the result in the dtype of its sums, and the log-sum-exp."""
    (out, lse), *others = [kernel.attend(q, *piece) for piece in _pieces(k, v, cuts)]
    assert {part.dtype for part in (out, *(part for part, _ in others))} == {q.dtype}
    out = out.to(accumulation_dtype(q.dtype))
    for part, part_lse in others:
        lse = merge(out, lse, part, part_lse)
    assert lse.shape == q.shape[:3]
    return out, lse


def gradients(
    kernel: PartKernel, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cuts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return those of q, k and v from the result and the log-sum-exp of the whole."""
    found = (kernel.gradients(gradient, q, *piece, out, lse) for piece in _pieces(k, v, cuts))
    of_q, of_k, of_v = zip(*found, strict=True)
    return sum(of_q[1:], of_q[0]), torch.cat(of_k, 2), torch.cat(of_v, 2)
