"""torch's own fused kernels, the default backend."""

from math import inf

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from opensora_cli.core.attention import AttentionBackend, AttentionFn, ComparedKernel, PartKernel
from opensora_cli.models.attention.math import MATH_PARTS

_aten = torch.ops.aten
_EFFICIENT_ALIGNMENT = 32
"""Multiple of queries to which the memory-efficient kernel pads its log-sum-exp."""


def _attend(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    return functional.scaled_dot_product_attention(q_BHND, k_BHMD, v_BHMD)


def _only(backend: SDPBackend) -> AttentionFn:
    def attend(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q_BHND, k_BHMD, v_BHMD)

    return attend


def part_kernel(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor) -> PartKernel:
    """Return the fastest kernel for such tensors: a fused kernel of torch, or else plain mathematics."""
    width, dtype = q_BHND.shape[-1], q_BHND.dtype
    if q_BHND.device.type == "cpu" and dtype.is_floating_point and dtype.itemsize > 1:
        return _CPU
    # These kernels get the tensors unchanged; only torch's public function would pad the heads.
    if q_BHND.device.type == "cuda" and width * dtype.itemsize % 16 == 0:
        params = cuda.SDPAParams(q_BHND, k_BHMD, v_BHMD, None, 0.0, False, False)
        if cuda.can_use_flash_attention(params):
            return _FLASH
        if cuda.can_use_efficient_attention(params):
            return _EFFICIENT
    return MATH_PARTS


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
    # The seed is for dropout, which is off; the kernel checks only its type.
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


_CPU = PartKernel(_attend_cpu, _gradients_cpu)
_FLASH = PartKernel(_attend_flash, _gradients_flash)
_EFFICIENT = PartKernel(_attend_efficient, _gradients_efficient)

sdpa = AttentionBackend(
    "sdpa",
    _attend,
    part_kernel=part_kernel,
    compared=(
        ("standard (math)", ComparedKernel(_only(SDPBackend.MATH), holds_all_scores=True)),
        ("memory-efficient", ComparedKernel(_only(SDPBackend.EFFICIENT_ATTENTION), runs_on_cpu=False)),
        ("flash", ComparedKernel(_only(SDPBackend.FLASH_ATTENTION))),
    ),
)
