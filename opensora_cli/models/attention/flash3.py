"""FlashAttention 3 (Shah et al. 2024), whose tensors have tokens before heads.

It is built from a repository without releases, whose functions changed. In its 3.0.0.b1, only the function below
returns the log-sum-exp, with an argument for every option.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from opensora_cli.core.attention import AttentionBackend, ComparedKernel, PartKernel, transposed


def _attend(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    from flash_attn_interface import flash_attn_func

    given = transposed(q_BHND, k_BHMD, v_BHMD)
    deterministic = torch.are_deterministic_algorithms_enabled()
    scale = q_BHND.shape[-1] ** -0.5
    found = flash_attn_func(*given, softmax_scale=scale, causal=False, deterministic=deterministic)
    # The first versions also returned the log-sum-exp.
    out_BNHD: Tensor = found[0] if isinstance(found, tuple) else found
    return out_BNHD.transpose(1, 2)


def _attend_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    import flash_attn_interface

    given, scale = transposed(q, k, v), q.shape[-1] ** -0.5
    attend = flash_attn_interface.flash_attn_func
    if "return_attn_probs" in inspect.signature(attend).parameters:
        out_BNHD, lse_BHN = attend(*given, softmax_scale=scale, causal=False, return_attn_probs=True)
    else:
        attend = flash_attn_interface._flash_attn_forward
        parameters = inspect.signature(attend).parameters.values()
        unused: dict[str, Any] = {each.name: None for each in list(parameters)[3:] if each.default is each.empty}
        out_BNHD, lse_BHN, *_ = attend(*given, **{**unused, "softmax_scale": scale, "causal": False})
    return out_BNHD.transpose(1, 2), lse_BHN


def _gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    from flash_attn_interface import _flash_attn_backward

    given = transposed(gradient, q, k, v, out)
    grads = [torch.empty_like(tensor) for tensor in given[1:4]]
    # Sequences have equal lengths, so that neither starts nor lengths are needed.
    of_lengths = [None] * 6
    deterministic = torch.are_deterministic_algorithms_enabled()
    # Positional because `causal` has two names.
    _flash_attn_backward(
        *given, lse.contiguous(), *of_lengths, *grads, q.shape[-1] ** -0.5, False, deterministic=deterministic
    )
    return transposed(*grads)


_PARTS = PartKernel(_attend_part, _gradients)
flash3 = AttentionBackend(
    "flash3",
    _attend,
    part_kernel=lambda q, k, v: _PARTS,
    compared=(("flash3", ComparedKernel(_attend, runs_on_cpu=False)),),
)
