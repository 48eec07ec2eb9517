"""Attention backends on a GPU against `math` in float64: the whole, its gradients, and parts with theirs."""

from contextlib import nullcontext

import pytest
import torch
from attention_parts import gradients, merged
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from opensora_cli.core.attention import ATTENTION_KINDS
from opensora_cli.engine.components.attention import AttentionUse, choose_attention, why_unusable
from opensora_cli.models.attention import BACKENDS
from opensora_cli.models.attention import sdpa as kernels
from opensora_cli.models.attention.torch_kernels import math
from opensora_cli.settings.devices import AttentionChoice

LENGTH, CUTS = 333, (200, 132, 1)
"""None fills a tile of the kernels."""
TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 0.004}
HALF = (torch.bfloat16, torch.float16)


def _needed(name: str, dtype: torch.dtype, head_dim: int, **needs: bool) -> None:
    use = AttentionUse(device=torch.device("cuda", 0), dtype=dtype, head_dim=head_dim, **needs)
    problem = why_unusable(name, use)
    if problem is not None:
        pytest.skip(problem)


def _drawn(dtype: torch.dtype, head_dim: int) -> list[Tensor]:
    """Return q, k, v and the gradient of the result, as a model lays them out: heads behind tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = 2, LENGTH, 3, head_dim
    return [torch.randn(shape, generator=generator).to("cuda", dtype).transpose(1, 2) for _ in range(4)]


@pytest.mark.parametrize("name", sorted(set(ATTENTION_KINDS) - {"math"}))
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_whole_and_its_gradients(name, dtype, head_dim):
    _needed(name, dtype, head_dim, gradients=True)
    *qkv, gradient = _drawn(dtype, head_dim)
    leaves = [tensor.clone().requires_grad_() for tensor in qkv]
    exact = [tensor.double().requires_grad_() for tensor in qkv]
    out, expected = BACKENDS[name](*leaves), math(*exact)
    assert (out.shape, out.dtype) == (qkv[0].shape, dtype)
    # Products in bfloat16 round weights of any dtype.
    tolerance = TOLERANCES[torch.bfloat16 if name == "bf16_products" else dtype]
    assert (out.double() - expected).abs().max() < tolerance
    grads = torch.autograd.grad(out, leaves, gradient)
    for found, other in zip(grads, torch.autograd.grad(expected, exact, gradient.double()), strict=True):
        assert (found.double() - other).abs().max() < 2 * tolerance


@pytest.mark.parametrize(
    ("name", "dtype", "only"),
    [
        *((name, dtype, None) for name, kind in sorted(ATTENTION_KINDS.items()) if kind.in_parts for dtype in HALF),
        *(("sdpa", dtype, SDPBackend.EFFICIENT_ATTENTION) for dtype in (torch.bfloat16, torch.float32)),
        ("math", torch.float32, None),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_parts_make_the_whole_and_its_gradients(name, dtype, only, head_dim):
    """With `only`, torch may use one of its kernels."""
    _needed(name, dtype, head_dim, in_parts=True)
    q, k, v, gradient = _drawn(dtype, head_dim)
    k, v = k.contiguous(), v.contiguous()
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = math(*exact)
    kernel_of = BACKENDS[name].part_kernel
    assert kernel_of is not None
    with sdpa_kernel(only) if only is not None else nullcontext():
        kernel = kernel_of(q, k, v)
    assert only is None or kernel is kernels._EFFICIENT
    out, lse = merged(kernel, q, k, v, CUTS)
    assert (out.double() - expected).abs().max() < TOLERANCES[dtype]
    grads = gradients(kernel, gradient, q, k, v, out.to(dtype), lse, CUTS)
    for found, other in zip(grads, torch.autograd.grad(expected, exact, gradient.double()), strict=True):
        assert (found.double() - other).abs().max() < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize("gradients", [False, True])
def test_what_auto_takes_agrees_with_math(gradients):
    use = AttentionUse(device=torch.device("cuda", 0), dtype=torch.bfloat16, head_dim=128, gradients=gradients)
    plan = choose_attention(AttentionChoice.AUTO, use, setting="runtime.attention")
    assert why_unusable(plan.backend, use) is None
    assert plan.reason.startswith("auto: ")
