"""Attention as written (Vaswani et al. 2017, eq. 1), for every device and dtype: the reference for all other backends.

It holds the (B, H, N, M) matrix of weights, so it is meant for short sequences.
"""

from math import sqrt

import torch
from torch import Tensor

from opensora_cli.core.attention import AttentionBackend, PartKernel, accumulation_dtype

_LARGEST_MATRIX = 1 << 26
"""Largest number of attention weights in memory if no gradient needs all of them."""


def _attend(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    """Compute in at least fp32; without gradients, in groups of queries that limit the matrix to about 256 MiB."""
    dtype = accumulation_dtype(v_BHMD.dtype)
    batch, heads, num_queries, width = q_BHND.shape
    block = num_queries
    if not torch.is_grad_enabled():
        block = max(1, _LARGEST_MATRIX // (batch * heads * k_BHMD.shape[2]))
    # Autocast would run both matmuls in bf16, which a reference must not do.
    with torch.autocast(q_BHND.device.type, enabled=False):
        k, v = k_BHMD.to(dtype), v_BHMD.to(dtype)
        outs = []
        for queries in torch.split(q_BHND, block, dim=2):
            weights = (queries.to(dtype) @ k.transpose(-2, -1) * (1.0 / sqrt(width))).softmax(dim=-1)
            outs.append((weights @ v).to(v_BHMD.dtype))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _attend_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        scores = _scores(q, k)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse[..., None]).exp_()
        return (weights @ v.to(weights.dtype)).to(q.dtype), lse


def _gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast(q.device.type, enabled=False):
        weights = _scores(q, k).sub_(lse[..., None]).exp_()
        dtype = weights.dtype
        gradient, out = gradient.to(dtype), out.to(dtype)
        grad_v = weights.mT @ gradient
        center = (gradient * out).sum(-1, keepdim=True)
        grad_scores = (gradient @ v.to(dtype).mT).sub_(center).mul_(weights).div_(sqrt(q.shape[-1]))
        grads = grad_scores @ k.to(dtype), grad_scores.mT @ q.to(dtype), grad_v
        return tuple(grad.to(q.dtype) for grad in grads)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    dtype = accumulation_dtype(q.dtype)
    return (q.to(dtype) @ k.to(dtype).mT).div_(sqrt(q.shape[-1]))


MATH_PARTS = PartKernel(_attend_part, _gradients)
math = AttentionBackend("math", _attend, part_kernel=lambda q, k, v: MATH_PARTS)
