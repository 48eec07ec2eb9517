"""Attention backends: their types, and a table of their properties for settings and checks.

Their code is in `models/attention/`. This module imports neither a backend nor torch.

A model calls a backend for whole sequences, and ring attention for parts of the keys. With L = log Σ exp(scores), the
result is the mean of its parts, weighted by exp(L_part - L) (Rabe & Staats 2021). In backward, a part needs only the L
and the result of the whole sequence (FlashAttention, Dao et al. 2022).
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class AttentionFn(Protocol):
    """Softmax attention without a mask, scaled by D^-0.5."""

    def __call__(self, q_BHND: "Tensor", k_BHMD: "Tensor", v_BHMD: "Tensor", /) -> "Tensor":
        """Return softmax(q k^T D^-0.5) v with shape (B, H, N, D), in `v_BHMD`'s dtype; M is N in self-attention."""


@dataclass(frozen=True, slots=True)
class PartKernel:
    """Kernel for attention to a part of the keys, with its gradients."""

    attend: "Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]"
    """(q_BHND, k_BHMD, v_BHMD) -> result (B, H, N, D) in their dtype, and log-sum-exp (B, H, N) in at least fp32.

    N and M are at least 1.
    """

    gradients: "Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]"
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
    part_kernel: "Callable[[Tensor, Tensor, Tensor], PartKernel] | None" = None
    """(q_BHND, k_BHMD, v_BHMD) -> kernel that computes such tensors in parts. None means no ring attention."""
    compared: tuple[tuple[str, ComparedKernel], ...] = ()
    """Kernels of the backend under the names that `osora mem-profile` prints."""

    def __call__(self, q_BHND: "Tensor", k_BHMD: "Tensor", v_BHMD: "Tensor", /) -> "Tensor":
        return self.attend(q_BHND, k_BHMD, v_BHMD)


@dataclass(frozen=True, slots=True)
class Library:
    """Package that contains the kernels of a backend."""

    module: str
    distribution: str
    install: str

    def version(self) -> str | None:
        """Return the installed version, or None.

        The module is not imported: that takes seconds, and a build for another torch may end the process.
        """
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            # `find_spec` would import the package of a module with a dot in its name.
            is_there = self.module in sys.modules or ("." not in self.module and importlib.util.find_spec(self.module))
            return "(unknown version)" if is_there else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """Properties of one attention backend."""

    description: str
    in_parts: bool = True
    """Whether ring attention can use it: its code has a kernel for parts of the keys."""
    half_only: bool = False
    """Whether it computes in float16 and bfloat16 only."""
    needs_gpu: bool = False
    """Whether its kernels run on CUDA devices only."""
    is_fused: bool = True
    """Whether its memory grows with tokens and not with pairs of tokens."""
    library: Library | None = None
    """None means that torch contains the kernels."""


ATTENTION_KINDS = {
    "sdpa": AttentionKind(description="torch's fused kernels; torch picks one by device and size"),
    "cudnn": AttentionKind(description="cuDNN's kernels, called through torch", half_only=True, needs_gpu=True),
    "flash3": AttentionKind(
        description="FlashAttention 3, for Hopper GPUs",
        in_parts=False,
        half_only=True,
        needs_gpu=True,
        # It has no release of its own yet.
        library=Library(
            "flash_attn_interface",
            "flash_attn_3",
            "git clone https://github.com/Dao-AILab/flash-attention && pip install --no-build-isolation "
            "./flash-attention/hopper",
        ),
    ),
    "flash4": AttentionKind(
        description="FlashAttention 4, for Hopper and Blackwell GPUs",
        in_parts=False,
        half_only=True,
        needs_gpu=True,
        library=Library("flash_attn.cute", "flash-attn-4", "pip install --pre flash-attn-4"),
    ),
    "xformers": AttentionKind(
        description="memory-efficient attention, from the package xformers",
        in_parts=False,
        needs_gpu=True,
        library=Library("xformers", "xformers", "pip install xformers==0.0.35 'torch==2.10.*'"),
    ),
    "math": AttentionKind(
        description="the formula in float32: the reference, for short sequences",
        is_fused=False,
    ),
    "bf16_products": AttentionKind(
        description="two matrix products in bfloat16: faster on a CPU for a few hundred tokens",
        in_parts=False,
        is_fused=False,
    ),
}


def attention_problems(name: str, *, setting: str, ring_degree: int | None, is_fp32: bool) -> Iterator[str]:
    """Yield each setting that contradicts the backend `name`, with the fix. Nothing contradicts `auto`.

    `is_fp32` says that the run computes in float32 on every device.
    """
    kind = ATTENTION_KINDS.get(name)
    if kind is None:
        return
    if (ring_degree or 1) > 1 and not kind.in_parts:
        others = [other for other, each in ATTENTION_KINDS.items() if each.in_parts]
        yield (
            f"{setting}={name} has no ring attention, which parallel.ring_degree={ring_degree} needs: "
            f"use auto, {', '.join(others[:-1])} or {others[-1]}, or parallel.ulysses_degree"
        )
    if kind.half_only and is_fp32:
        yield f"{setting}={name} computes in float16 and bfloat16 only, not in float32: use one of these, or sdpa"
