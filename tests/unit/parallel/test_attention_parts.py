"""Attention by parts of the keys, in one process."""

import pytest
import torch
from torch.nn import functional

from opensora_cli.parallel.attention_parts import MATH, accumulation_dtype, merge, part_kernel

WIDTH = 8


def draw(*lengths, dtype, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(2, 3, n, WIDTH, generator=generator, dtype=torch.float64) * scale).to(dtype) for n in lengths]


def kernels(*tensors):
    fused = part_kernel(*tensors)
    assert fused is not MATH
    return fused, MATH


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("cuts", [(7,), (3, 4), (1, 1, 5)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 0.03)]
)
def test_parts_make_the_whole(dtype, tolerance, cuts, scale):
    q, k, v = draw(5, 7, 7, dtype=dtype)
    # Scores of 1e4, of which no exponential is finite.
    q, k = q * scale, k * scale
    scores = q.double() @ k.double().mT / WIDTH**0.5
    expected = scores.softmax(-1) @ v.double()
    for kernel in kernels(q, k, v):
        parts = [kernel.attend(q, *part) for part in zip(k.split(cuts, 2), v.split(cuts, 2), strict=True)]
        assert all(part.dtype is dtype for part, _ in parts)
        (out, lse), *others = parts
        out = out.to(accumulation_dtype(dtype))
        for part, part_lse in others:
            lse = merge(out, lse, part, part_lse)
        assert lse.dtype is out.dtype is accumulation_dtype(dtype)
        of_scores = 10 * torch.finfo(lse.dtype).eps * scale**2
        assert (out.double() - expected).abs().max() <= tolerance + of_scores
        assert torch.allclose(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 0.03)]
)
def test_gradients_of_parts_make_those_of_the_whole(dtype, tolerance):
    q, k, v, gradient = draw(5, 7, 7, 5, dtype=dtype)
    exact = [tensor.double().clone().requires_grad_() for tensor in (q, k, v)]
    expected = torch.autograd.grad(functional.scaled_dot_product_attention(*exact), exact, gradient.double())
    # As a model hands it back: heads behind tokens in memory.
    gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    for kernel in kernels(q, k, v):
        out, lse = kernel.attend(q, k, v)
        parts = [
            kernel.gradients(gradient, q, *part, out, lse)
            for part in zip(k.split((3, 4), 2), v.split((3, 4), 2), strict=True)
        ]
        of_q, of_k, of_v = zip(*parts, strict=True)
        for found, exact_one in zip((sum(of_q), torch.cat(of_k, 2), torch.cat(of_v, 2)), expected, strict=True):
            assert found.dtype is dtype
            assert (found.double() - exact_one).abs().max() < tolerance


def test_mathematics_ignores_autocast():
    tensors = draw(5, 7, 7, dtype=torch.float32)
    plain = MATH.attend(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, MATH.attend(*tensors), plain))


def test_other_devices_fall_back_on_mathematics():
    assert part_kernel(*(tensor.to("meta") for tensor in draw(5, 7, 7, dtype=torch.float32))) is MATH
