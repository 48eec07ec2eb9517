"""FlashAttention 2 (Dao 2023) of the package flash-attn, whose tensors have tokens before heads.

Its functions pad heads to a multiple of 8, except for the functions below that ring attention needs.
"""

import torch
from torch import Tensor

from opensora_cli.core.attention import AttentionBackend, ComparedKernel, PartKernel, transposed


def _attend(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    from flash_attn import flash_attn_func

    deterministic = torch.are_deterministic_algorithms_enabled()
    out_BNHD: Tensor = flash_attn_func(
        *transposed(q_BHND, k_BHMD, v_BHMD),
        dropout_p=0.0,
        softmax_scale=q_BHND.shape[-1] ** -0.5,
        causal=False,
        deterministic=deterministic,
    )
    return out_BNHD.transpose(1, 2)


def _attend_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn import flash_attn_func

    out_BNHD, lse_BHN, _ = flash_attn_func(
        *transposed(q, k, v),
        dropout_p=0.0,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=False,
        return_attn_probs=True,
    )
    return out_BNHD.transpose(1, 2), lse_BHN


def _gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    from flash_attn.flash_attn_interface import _flash_attn_backward

    given = transposed(gradient, q, k, v, out)
    grads = [torch.empty_like(tensor) for tensor in given[1:4]]
    _flash_attn_backward(
        *given,
        lse.contiguous(),
        *grads,
        dropout_p=0.0,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return transposed(*grads)


_PARTS = PartKernel(_attend_part, _gradients)
flash2 = AttentionBackend(
    "flash2",
    _attend,
    part_kernel=lambda q, k, v: _PARTS,
    compared=(("flash2", ComparedKernel(_attend, runs_on_cpu=False)),),
)
