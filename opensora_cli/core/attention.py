"""What an attention backend is: called by a model for whole sequences, and by ring attention for parts of the keys.

With L = log Σ exp(scores), the whole is the mean of its parts weighted by exp(L_part - L) (Rabe & Staats 2021).
Backward, a part needs no more of the others than the L and the result of the whole (FlashAttention, Dao et al. 2022).
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
    """Attention to a part of the keys, and its gradient."""

    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(q_BHND, k_BHMD, v_BHMD) -> result (B, H, N, D) in their dtype, and log-sum-exp (B, H, N) in at least fp32.

    N and M are at least 1.
    """

    gradients: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    """(gradient_BHND, q_BHND, k_BHMD, v_BHMD, out_BHND, lse_BHN) -> this part's gradients of q, k and v.

    The gradient, `out` and `lse` are those of the whole, of which k and v are a part.
    """


@dataclass(frozen=True, slots=True)
class ComparedKernel:
    """A row of the comparison that `osora mem-profile` prints."""

    attend: AttentionFn
    holds_all_scores: bool = False
    """Whether it needs memory for the scores and weights of all pairs."""
    runs_on_cpu: bool = True


@dataclass(frozen=True)
class AttentionBackend:
    """A way to compute attention: what a model is handed and calls."""

    name: str
    attend: AttentionFn
    part_kernel: Callable[[Tensor, Tensor, Tensor], PartKernel] | None = None
    """(q_BHND, k_BHMD, v_BHMD) -> the kernel that computes such tensors in parts; None: no ring attention with it."""
    compared: tuple[tuple[str, ComparedKernel], ...] = ()
    """Its kernels under the names that `osora mem-profile` prints."""
    mismatch: Callable[[], str | None] | None = None
    """Says, of an installed library without kernels for this torch, for which it has some; None: nothing to say."""

    def __call__(self, q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
        """Return the attention of whole sequences; see `AttentionFn`."""
        return self.attend(q_BHND, k_BHMD, v_BHMD)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parts are summed: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def transposed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return (B, H, N, D) as (B, N, H, D), or back, in the same memory."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)
