"""Attention to some of the keys at a time: parts that know their log-sum-exp and so can be put together afterwards.

With L = log Σ exp(scores), the whole is the mean of its parts weighted by exp(L_part - L) (Rabe & Staats 2021).
Backward, a part needs no more of the others than the L and the result of the whole (FlashAttention, Dao et al. 2022).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt
from typing import Protocol

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional

_aten = torch.ops.aten
_EFFICIENT_ALIGNMENT = 32
"""Queries to a multiple of which the memory-efficient kernel pads its log-sum-exp."""


class Attention(Protocol):
    """Softmax attention without a mask, scaled by D^-0.5."""

    def __call__(self, q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
        """Return softmax(q k^T D^-0.5) v with shape (B, H, N, D)."""


@dataclass(frozen=True, slots=True)
class PartKernel:
    """A way to compute attention without a mask, scaled by D^-0.5, and its gradient."""

    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(q_BHND, k_BHMD, v_BHMD) -> result (B, H, N, D) in their dtype, and log-sum-exp (B, H, N) in at least fp32.

    N and M are at least 1.
    """

    gradients: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    """(gradient_BHND, q_BHND, k_BHMD, v_BHMD, out_BHND, lse_BHN) -> this part's gradients of q, k and v.

    The gradient, `out` and `lse` are those of the whole, of which k and v are a part.
    """


def part_kernel(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor) -> PartKernel:
    """Return the fastest kernel that takes such tensors: torch's own fused ones, or else plain mathematics."""
    width, dtype = q_BHND.shape[-1], q_BHND.dtype
    if q_BHND.device.type == "cpu" and dtype.is_floating_point and dtype.itemsize > 1:
        return _CPU
    # Tensors reach these kernels as they are: it is torch's public function that would pad the heads.
    if q_BHND.device.type == "cuda" and width * dtype.itemsize % 16 == 0:
        params = cuda.SDPAParams(q_BHND, k_BHMD, v_BHMD, None, 0.0, False, False)
        if cuda.can_use_flash_attention(params):
            return _FLASH
        if cuda.can_use_efficient_attention(params):
            return _EFFICIENT
    return MATH


def merge(out_BHND: Tensor, lse_BHN: Tensor, part_BHND: Tensor, part_lse_BHN: Tensor) -> Tensor:
    """Merge one more part into `out_BHND`, in place, and return the new log-sum-exp.

    No exponential of a score is taken, so that none overflows: only a weight in 0..1, and the logarithm's stable sum.

    Args:
        out_BHND: the parts before, in at least fp32.
        lse_BHN: their log-sum-exp.
        part_BHND: the part, in any dtype.
        part_lse_BHN: its log-sum-exp.
    """
    weight_BHN1 = torch.sigmoid(part_lse_BHN - lse_BHN)[..., None].to(out_BHND.dtype)
    out_BHND.lerp_(part_BHND.to(out_BHND.dtype), weight_BHN1)
    return torch.logaddexp(lse_BHN, part_lse_BHN)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parts are summed: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def _attend_cpu(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return out, lse


def _gradients_cpu(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return tuple(backward(gradient, q, k, v, out, lse, 0.0, False))


def _attend_flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v)
    return out, lse


def _gradients_flash(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    # Random numbers are for dropout, of which there is none; the kernel looks only at the type.
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    offset = torch.empty((), dtype=torch.uint64, device=q.device)
    backward = _aten._scaled_dot_product_flash_attention_backward
    grads = backward(gradient, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, False, seed, offset)
    return tuple(grads)


def _attend_efficient(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
    return out, lse[..., : q.shape[2]]


def _gradients_efficient(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    lse = functional.pad(lse, (0, -q.shape[2] % _EFFICIENT_ALIGNMENT), value=inf)
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    backward = _aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    return tuple(backward(gradient, q, k, v, None, out, lse, seed, seed, 0.0, wanted))[:3]


def _attend_math(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        scores = _scores(q, k)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse[..., None]).exp_()
        return (weights @ v.to(weights.dtype)).to(q.dtype), lse


def _gradients_math(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast(q.device.type, enabled=False):
        weights = _scores(q, k).sub_(lse[..., None]).exp_()
        dtype = weights.dtype
        gradient, out = gradient.to(dtype), out.to(dtype)
        grad_v = weights.mT @ gradient
        centre = (gradient * out).sum(-1, keepdim=True)
        grad_scores = (gradient @ v.to(dtype).mT).sub_(centre).mul_(weights).div_(sqrt(q.shape[-1]))
        grads = grad_scores @ k.to(dtype), grad_scores.mT @ q.to(dtype), grad_v
        return tuple(grad.to(q.dtype) for grad in grads)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    dtype = accumulation_dtype(q.dtype)
    return (q.to(dtype) @ k.to(dtype).mT).div_(sqrt(q.shape[-1]))


MATH = PartKernel(_attend_math, _gradients_math)
"""As written, for every device and dtype; it holds the whole (B, H, N, M) matrix of one part."""
_CPU = PartKernel(_attend_cpu, _gradients_cpu)
_FLASH = PartKernel(_attend_flash, _gradients_flash)
_EFFICIENT = PartKernel(_attend_efficient, _gradients_efficient)
