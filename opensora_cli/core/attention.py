"""Types of attention backends. A model calls a backend for whole sequences, and ring attention for parts of the keys.

With L = log Σ exp(scores), the result is the mean of its parts, weighted by exp(L_part - L) (Rabe & Staats 2021).
In backward, a part needs only the L and the result of the whole sequence (FlashAttention, Dao et al. 2022).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class AttentionFn(Protocol):
    """Softmax attention without a mask, scaled by D^-0.5."""

    def __call__(self, q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
        """Return softmax(q k^T D^-0.5) v with shape (B, H, N, D), in `v_BHMD`'s dtype; M is N in self-attention."""


@dataclass(frozen=True, slots=True)
class PartKernel:
    """Kernel for attention to a part of the keys, with its gradients."""

    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(q_BHND, k_BHMD, v_BHMD) -> result (B, H, N, D) in their dtype, and log-sum-exp (B, H, N) in at least fp32.

    N and M are at least 1.
    """

    gradients: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    """(gradient_BHND, q_BHND, k_BHMD, v_BHMD, out_BHND, lse_BHN) -> gradients of q, k and v from this part.

    The gradient, `out` and `lse` belong to attention to all keys; k and v are a part of them.
    """


@dataclass(frozen=True, slots=True)
class ComparedKernel:
    """A row of the comparison that `osora mem-profile` prints."""

    attend: AttentionFn
    holds_all_scores: bool = False
    """Whether the kernel needs memory for the scores and weights of all pairs."""
    runs_on_cpu: bool = True


@dataclass(frozen=True)
class AttentionBackend:
    """Attention backend that a model receives and calls."""

    name: str
    attend: AttentionFn
    part_kernel: Callable[[Tensor, Tensor, Tensor], PartKernel] | None = None
    """(q_BHND, k_BHMD, v_BHMD) -> kernel that computes such tensors in parts. None means no ring attention."""
    compared: tuple[tuple[str, ComparedKernel], ...] = ()
    """Kernels of the backend under the names that `osora mem-profile` prints."""

    def __call__(self, q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
        return self.attend(q_BHND, k_BHMD, v_BHMD)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parts are summed: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
