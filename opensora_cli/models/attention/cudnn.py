"""cuDNN's attention through torch, for Ampere, Ada, Hopper and Blackwell GPUs."""

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from opensora_cli.core.attention import AttentionBackend, ComparedKernel, PartKernel

_aten = torch.ops.aten


def _attend(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(q_BHND, k_BHMD, v_BHMD)


def _attend_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # Heads come before tokens in memory because the log-sum-exp has the order of the inputs.
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    out, lse_BHN1, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    return out, lse_BHN1.squeeze(-1)


def _gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    gradient, q, k, v, out = (tensor.contiguous() for tensor in (gradient, q, k, v, out))
    # The seed is for dropout, which is off.
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    backward = _aten._scaled_dot_product_cudnn_attention_backward
    lengths = q.shape[2], k.shape[2]
    return tuple(
        backward(
            gradient, q, k, v, out, lse[..., None].contiguous(), seed, seed, None, None, None, *lengths, 0.0, False
        )
    )


_PARTS = PartKernel(_attend_part, _gradients)
cudnn = AttentionBackend(
    "cudnn",
    _attend,
    part_kernel=lambda q, k, v: _PARTS,
    compared=(("cudnn", ComparedKernel(_attend, runs_on_cpu=False)),),
)
