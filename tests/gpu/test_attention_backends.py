"""Every attention backend on a GPU against `math` in float64: the whole, its gradients, and parts with theirs."""

import pytest
import torch
from attention_parts import gradients, merged
from torch import Tensor

from opensora_cli.core.attention_kinds import ATTENTION_KINDS
from opensora_cli.engine.components.attention import AttentionUse, choose_attention, why_unusable
from opensora_cli.models.attention import BACKENDS
from opensora_cli.models.attention.torch_kernels import math
from opensora_cli.settings.enums import AttentionChoice

LENGTH, CUTS = 333, (200, 132, 1)
"""None fills a tile of the kernels."""
TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 0.004}


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
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_whole_and_its_gradients(name: str, dtype: torch.dtype, head_dim: int) -> None:
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


@pytest.mark.parametrize("name", sorted(name for name, kind in ATTENTION_KINDS.items() if kind.in_parts))
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_parts_make_the_whole_and_its_gradients(name: str, dtype: torch.dtype) -> None:
    _needed(name, dtype, 128, in_parts=True)
    q, k, v, gradient = _drawn(dtype, 128)
    k, v = k.contiguous(), v.contiguous()
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = math(*exact)
    kernel = BACKENDS[name].part_kernel
    assert kernel is not None
    of_parts = kernel(q, k, v)
    out, lse = merged(of_parts, q, k, v, CUTS)
    assert (out.double() - expected).abs().max() < TOLERANCES[dtype]
    grads = gradients(of_parts, gradient, q, k, v, out.to(dtype), lse, CUTS)
    for found, other in zip(grads, torch.autograd.grad(expected, exact, gradient.double()), strict=True):
        assert (found.double() - other).abs().max() < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize("gradients", [False, True])
def test_what_auto_takes_agrees_with_math(gradients: bool) -> None:
    use = AttentionUse(device=torch.device("cuda", 0), dtype=torch.bfloat16, head_dim=128, gradients=gradients)
    plan = choose_attention(AttentionChoice.AUTO, use, setting="runtime.attention")
    assert why_unusable(plan.backend, use) is None
    assert plan.reason.startswith("auto: ")
