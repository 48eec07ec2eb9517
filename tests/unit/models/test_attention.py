"""The attention backends, whole and by parts of the keys, and their registry."""

import pytest
import torch
from attention_parts import gradients, merged
from closeness import assert_close
from torch.nn import functional

from opensora_cli.core.device import accumulation_dtype
from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.attention import BACKENDS
from opensora_cli.models.attention.torch_kernels import MATH_PARTS, math, sdpa
from opensora_cli.parallel.ring import RingAttention

WIDTH = 8


def draw(*lengths, dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, n, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for n in lengths]


@pytest.mark.parametrize(("name", "tolerance"), [("sdpa", 1e-6), ("bf16_products", 0.03)])
def test_every_backend_computes_what_the_reference_does(name, tolerance):
    q, k, v = draw(7, 7, 7, dtype=torch.float32)
    out = BACKENDS[name](q, k, v)
    assert out.dtype is torch.float32
    assert torch.allclose(out, math(q, k, v), atol=tolerance)


def test_math_keeps_fp32_under_autocast_and_returns_the_dtype_of_values():
    q, k, v = draw(5, 5, 5, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = math(q, k, v)
        parts = MATH_PARTS.attend(q, k, v)
    assert torch.equal(inside, math(q, k, v))
    assert all(map(torch.equal, parts, MATH_PARTS.attend(q, k, v)))
    assert math(q, k, v.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("backend", [BACKENDS["bf16_products"], functional.scaled_dot_product_attention])
def test_a_ring_refuses_attention_without_parts(backend):
    with pytest.raises(RequestError, match="does not compute in parts"):
        RingAttention(backend, None, None)


@pytest.mark.parametrize("kernel", ["fused", "math"])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "cuts", "scale"),
    [
        (torch.float64, 1e-12, (1, 1, 5), 60.0),
        (torch.float32, 2e-6, (7,), 60.0),
        (torch.float32, 2e-6, (3, 4), 1.0),
        (torch.bfloat16, 0.03, (3, 4), 60.0),
    ],
)
def test_parts_make_the_whole(dtype, tolerance, cuts, scale, kernel):
    q, k, v = draw(5, 7, 7, dtype=dtype)
    # At 60, scores of 1e4, of which no exponential is finite.
    q, k = q * scale, k * scale
    scores = q.double() @ k.double().mT / WIDTH**0.5
    expected = scores.softmax(-1) @ v.double()
    out, lse = merged(kernel_of(kernel, q, k, v), q, k, v, cuts)
    assert lse.dtype is out.dtype is accumulation_dtype(dtype)
    of_scores = 10 * torch.finfo(lse.dtype).eps * scale**2
    assert (out.double() - expected).abs().max() <= tolerance + of_scores
    assert_close(lse.double(), scores.logsumexp(-1))


@pytest.mark.parametrize("kernel", ["fused", "math"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 0.03)]
)
def test_gradients_of_parts_make_those_of_the_whole(dtype, tolerance, kernel):
    q, k, v, gradient = draw(5, 7, 7, 5, dtype=dtype)
    exact = [tensor.double().clone().requires_grad_() for tensor in (q, k, v)]
    expected = torch.autograd.grad(functional.scaled_dot_product_attention(*exact), exact, gradient.double())
    # As a model hands it back: heads behind tokens in memory.
    gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    chosen = kernel_of(kernel, q, k, v)
    out, lse = chosen.attend(q, k, v)
    for found, exact_one in zip(gradients(chosen, gradient, q, k, v, out, lse, (3, 4)), expected, strict=True):
        assert found.dtype is dtype
        assert (found.double() - exact_one).abs().max() < tolerance


def kernel_of(name, *tensors):
    fused = sdpa.part_kernel(*tensors)
    assert fused is not MATH_PARTS
    return fused if name == "fused" else math.part_kernel(*tensors)
