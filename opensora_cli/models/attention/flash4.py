"""FlashAttention 4 of the package flash-attn-4, whose tensors have tokens before heads.

It compiles a kernel at the first call with each head size, on Hopper and Blackwell GPUs.
"""

import torch
from torch import Tensor

from opensora_cli.core.attention import AttentionBackend, ComparedKernel, PartKernel, transposed


def _attend(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    return _attend_part(q_BHND, k_BHMD, v_BHMD)[0]


def _attend_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn.cute import flash_attn_func

    out_BNHD, lse_BHN = flash_attn_func(
        *transposed(q, k, v),
        softmax_scale=q.shape[-1] ** -0.5,
        causal=False,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        return_lse=True,
    )
    return out_BNHD.transpose(1, 2), lse_BHN


def _gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    from flash_attn.cute.interface import _flash_attn_bwd

    grads = _flash_attn_bwd(
        *transposed(q, k, v, out, gradient),
        lse.contiguous(),
        softmax_scale=q.shape[-1] ** -0.5,
        causal=False,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return transposed(*grads)


_PARTS = PartKernel(_attend_part, _gradients)
flash4 = AttentionBackend(
    "flash4",
    _attend,
    part_kernel=lambda q, k, v: _PARTS,
    compared=(("flash4", ComparedKernel(_attend, runs_on_cpu=False)),),
)
