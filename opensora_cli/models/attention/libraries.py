"""Attention of optional libraries, which are imported at the first call. Their tensors have tokens before heads."""

import torch
from torch import Tensor

from opensora_cli.core.attention import AttentionBackend, AttentionFn, ComparedKernel


def _backend(name: str, attend: AttentionFn) -> AttentionBackend:
    return AttentionBackend(name, attend, compared=((name, ComparedKernel(attend, runs_on_cpu=False)),))


def _transposed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views of (B, H, N, D) tensors as (B, N, H, D), or the reverse."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _xformers(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    from xformers.ops import memory_efficient_attention

    scale = q_BHND.shape[-1] ** -0.5
    out_BNHD: Tensor = memory_efficient_attention(*_transposed(q_BHND, k_BHMD, v_BHMD), p=0.0, scale=scale)
    return out_BNHD.transpose(1, 2)


xformers = _backend("xformers", _xformers)
"""Memory-efficient attention (Rabe & Staats 2021) of the package xformers."""


def _flash3(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    from flash_attn_interface import flash_attn_func

    given = _transposed(q_BHND, k_BHMD, v_BHMD)
    deterministic = torch.are_deterministic_algorithms_enabled()
    scale = q_BHND.shape[-1] ** -0.5
    out_BNHD: Tensor = flash_attn_func(*given, softmax_scale=scale, causal=False, deterministic=deterministic)
    return out_BNHD.transpose(1, 2)


flash3 = _backend("flash3", _flash3)
"""FlashAttention 3 (Shah et al. 2024), built from a repository whose functions changed without releases."""


def _flash4(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    from flash_attn.cute import flash_attn_func

    out_BNHD: Tensor = flash_attn_func(
        *_transposed(q_BHND, k_BHMD, v_BHMD),
        softmax_scale=q_BHND.shape[-1] ** -0.5,
        causal=False,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )[0]
    return out_BNHD.transpose(1, 2)


flash4 = _backend("flash4", _flash4)
"""FlashAttention 4 of the package flash-attn-4. It compiles a kernel at the first call with each head size."""
