"""Attention of optional libraries, which are imported at the first call. Their tensors have tokens before heads."""

import torch
from torch import Tensor

from opensora_cli.core.attention import AttentionBackend, AttentionFn, ComparedKernel, PartKernel


def _backend(name: str, attend: AttentionFn, parts: PartKernel | None = None) -> AttentionBackend:
    return AttentionBackend(
        name,
        attend,
        part_kernel=None if parts is None else lambda q, k, v: parts,
        compared=((name, ComparedKernel(attend, runs_on_cpu=False)),),
    )


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


def _flash2(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    from flash_attn import flash_attn_func

    out_BNHD: Tensor = flash_attn_func(
        *_transposed(q_BHND, k_BHMD, v_BHMD),
        dropout_p=0.0,
        softmax_scale=q_BHND.shape[-1] ** -0.5,
        causal=False,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out_BNHD.transpose(1, 2)


flash2 = _backend("flash2", _flash2)
"""FlashAttention 2 (Dao 2023) of the package flash-attn. For parts torch has the same kernels."""


def _flash3(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    from flash_attn_interface import flash_attn_func

    given = _transposed(q_BHND, k_BHMD, v_BHMD)
    deterministic = torch.are_deterministic_algorithms_enabled()
    scale = q_BHND.shape[-1] ** -0.5
    out_BNHD: Tensor = flash_attn_func(*given, softmax_scale=scale, causal=False, deterministic=deterministic)
    return out_BNHD.transpose(1, 2)


def _flash3_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import flash_attn_func

    given, scale = _transposed(q, k, v), q.shape[-1] ** -0.5
    out_BNHD, lse_BHN = flash_attn_func(*given, softmax_scale=scale, causal=False, return_attn_probs=True)
    return out_BNHD.transpose(1, 2), lse_BHN


def _flash3_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    from flash_attn_interface import _flash_attn_backward

    given = _transposed(gradient, q, k, v, out)
    grads = [torch.empty_like(tensor) for tensor in given[1:4]]
    # Sequences have equal lengths, so that neither starts nor lengths are needed.
    of_lengths = [None] * 6
    deterministic = torch.are_deterministic_algorithms_enabled()
    # Positional because `causal` has two names.
    _flash_attn_backward(
        *given, lse.contiguous(), *of_lengths, *grads, q.shape[-1] ** -0.5, False, deterministic=deterministic
    )
    return _transposed(*grads)


flash3 = _backend("flash3", _flash3, PartKernel(_flash3_part, _flash3_gradients))
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
