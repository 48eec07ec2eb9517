"""Attention that needs only torch: its fused kernels, the formula, and two products in bfloat16."""

from math import inf, sqrt

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from opensora_cli.core.attention import AttentionBackend, AttentionFn, ComparedKernel, PartKernel
from opensora_cli.core.device import accumulation_dtype

_aten = torch.ops.aten
_EFFICIENT_ALIGNMENT = 32
"""Multiple of queries to which the memory-efficient kernel pads its log-sum-exp."""
_LARGEST_MATRIX = 1 << 26
"""Largest number of attention weights that `math` holds if no gradient needs all of them."""
_SCORES_AT_A_TIME = 2**21


def _math(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    """Compute in at least fp32; without gradients, in groups of queries that limit the matrix to about 256 MiB."""
    dtype = accumulation_dtype(v_BHMD.dtype)
    batch, heads, num_queries, width = q_BHND.shape
    block = num_queries
    if not torch.is_grad_enabled():
        block = max(1, _LARGEST_MATRIX // (batch * heads * k_BHMD.shape[2]))
    # Autocast would run both matmuls in bf16, which a reference must not do.
    with torch.autocast(q_BHND.device.type, enabled=False):
        k, v = k_BHMD.to(dtype), v_BHMD.to(dtype)
        outs = []
        for queries in torch.split(q_BHND, block, dim=2):
            weights = (queries.to(dtype) @ k.transpose(-2, -1) * (1.0 / sqrt(width))).softmax(dim=-1)
            outs.append((weights @ v).to(v_BHMD.dtype))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _math_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        scores = _scores(q, k)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse[..., None]).exp_()
        return (weights @ v.to(weights.dtype)).to(q.dtype), lse


def _math_gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast(q.device.type, enabled=False):
        weights = _scores(q, k).sub_(lse[..., None]).exp_()
        dtype = weights.dtype
        gradient, out = gradient.to(dtype), out.to(dtype)
        grad_v = weights.mT @ gradient
        center = (gradient * out).sum(-1, keepdim=True)
        grad_scores = (gradient @ v.to(dtype).mT).sub_(center).mul_(weights).div_(sqrt(q.shape[-1]))
        grads = grad_scores @ k.to(dtype), grad_scores.mT @ q.to(dtype), grad_v
        return tuple(grad.to(q.dtype) for grad in grads)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    dtype = accumulation_dtype(q.dtype)
    return (q.to(dtype) @ k.to(dtype).mT).div_(sqrt(q.shape[-1]))


MATH_PARTS = PartKernel(_math_part, _math_gradients)
math = AttentionBackend("math", _math, part_kernel=lambda q, k, v: MATH_PARTS)
"""Attention as written (Vaswani et al. 2017, eq. 1), for every device and dtype: the reference for all other backends.

It holds the (B, H, N, M) matrix of weights, so it is meant for short sequences.
"""


def _only(backend: SDPBackend) -> AttentionFn:
    def attend(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q_BHND, k_BHMD, v_BHMD)

    return attend


def _sdpa(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    return functional.scaled_dot_product_attention(q_BHND, k_BHMD, v_BHMD)


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


def _cpu_gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return tuple(backward(gradient, q, k, v, out, lse, 0.0, False))


def _flash_gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    # The seed is for dropout, which is off; the kernel checks only its type.
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    offset = torch.empty((), dtype=torch.uint64, device=q.device)
    backward = _aten._scaled_dot_product_flash_attention_backward
    grads = backward(gradient, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, False, seed, offset)
    return tuple(grads)


def _efficient_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
    return out, lse[..., : q.shape[2]]


def _efficient_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    lse = functional.pad(lse, (0, -q.shape[2] % _EFFICIENT_ALIGNMENT), value=inf)
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    backward = _aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    return tuple(backward(gradient, q, k, v, None, out, lse, seed, seed, 0.0, wanted))[:3]


_CPU = PartKernel(lambda q, k, v: _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[:2], _cpu_gradients)
_FLASH = PartKernel(lambda q, k, v: _aten._scaled_dot_product_flash_attention(q, k, v)[:2], _flash_gradients)
_EFFICIENT = PartKernel(_efficient_part, _efficient_gradients)

sdpa = AttentionBackend(
    "sdpa",
    _sdpa,
    part_kernel=part_kernel,
    compared=(
        ("standard (math)", ComparedKernel(_only(SDPBackend.MATH), holds_all_scores=True)),
        ("memory-efficient", ComparedKernel(_only(SDPBackend.EFFICIENT_ATTENTION), runs_on_cpu=False)),
        ("flash", ComparedKernel(_only(SDPBackend.FLASH_ATTENTION))),
    ),
)
"""Torch's own choice among its fused kernels, the default backend."""


def _cudnn_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # Heads come before tokens in memory because the log-sum-exp has the order of the inputs.
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    out, lse_BHN1, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    return out, lse_BHN1.squeeze(-1)


def _cudnn_gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    gradient, q, k, v, out, lse = (tensor.contiguous() for tensor in (gradient, q, k, v, out, lse[..., None]))
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # for dropout, which is off
    backward = _aten._scaled_dot_product_cudnn_attention_backward
    lengths = q.shape[2], k.shape[2]
    return tuple(backward(gradient, q, k, v, out, lse, seed, seed, None, None, None, *lengths, 0.0, False))


_CUDNN_PARTS = PartKernel(_cudnn_part, _cudnn_gradients)
_cudnn = _only(SDPBackend.CUDNN_ATTENTION)
cudnn = AttentionBackend(
    "cudnn",
    _cudnn,
    part_kernel=lambda q, k, v: _CUDNN_PARTS,
    compared=(("cudnn", ComparedKernel(_cudnn, runs_on_cpu=False)),),
)
"""cuDNN's kernels alone, for Ampere, Ada, Hopper and Blackwell GPUs."""


def _bf16_products(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, /) -> Tensor:
    q = (q_BHND * q_BHND.shape[-1] ** -0.5).to(torch.bfloat16)
    k, v = (tensor.to(torch.bfloat16) for tensor in (k_BHMD, v_BHMD))
    # A few samples at a time, whose scores and their gradients stay in the processor's cache.
    samples = max(1, _SCORES_AT_A_TIME // max(1, q.shape[1] * q.shape[2] * k.shape[2]))
    parts = zip(*(tensor.split(samples) for tensor in (q, k, v)), strict=True)
    outs = [(q @ k.transpose(-2, -1)).softmax(dim=-1).to(v.dtype) @ v for q, k, v in parts]
    return torch.cat(outs).to(v_BHMD.dtype)


bf16_products = AttentionBackend("bf16_products", _bf16_products)
"""Two matrix products in bfloat16.

For a hundred tokens they took a CPU a quarter of the fused kernel's time in bfloat16, and under half of its time in
float32, forward and backward. The fused kernel pays off for long sequences.
"""
