"""Backends of libraries, each against the signatures recorded of it, and cuDNN's against torch's own schema."""

import pytest
import torch
from attention_libraries import HALF, fake_flash3, fake_flash4, fake_xformers

from opensora_cli.core.attention import ATTENTION_KINDS
from opensora_cli.models.attention import BACKENDS
from opensora_cli.models.attention.torch_kernels import math
from opensora_cli.settings.devices import AttentionChoice

FAKES = [("flash3", fake_flash3), ("flash4", fake_flash4), ("xformers", fake_xformers)]
TOLERANCE = 0.03
"""Of bfloat16, for results of about 1."""


def draw(*lengths, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, n, 16, generator=generator).to(dtype) for n in lengths]


@pytest.mark.parametrize(("name", "fake"), FAKES)
@pytest.mark.parametrize("dtype", HALF)
def test_the_whole_and_its_gradients_are_those_of_math(monkeypatch, name, fake, dtype):
    library = fake(monkeypatch)
    *qkv, gradient = draw(7, 7, 7, 7, dtype=dtype)
    found, expected = [], []
    for attention, results in ((BACKENDS[name], found), (math, expected)):
        leaves = [tensor.clone().requires_grad_() for tensor in qkv]
        out = attention(*leaves)
        results += [out, *torch.autograd.grad(out, leaves, gradient)]
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    assert all(tensor.dtype is dtype for tensor in found)
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).abs().max() < TOLERANCE
    ((_, given),) = library.calls
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    assert [tensor.shape for tensor in tensors] == [(2, 7, 3, 16)] * 3
    assert given.get("softmax_scale", given.get("scale")) == 16**-0.5


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_gradients_are_summed_in_one_order_if_torch_is_deterministic(monkeypatch, is_deterministic):
    library = fake_flash3(monkeypatch)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    BACKENDS["flash3"](*draw(5, 5, 5))
    ((_, given),) = library.calls
    assert given["deterministic"] is is_deterministic


def test_cudnn_in_parts_has_the_shapes_of_torchs_schema():
    """On the meta device, where torch checks arguments and shapes, and computes nothing."""
    q, k, v, gradient = (tensor.to("meta") for tensor in draw(5, 7, 7, 5))
    kernel = BACKENDS["cudnn"].part_kernel(q, k, v)
    out, lse = kernel.attend(q, k, v)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    grads = kernel.gradients(gradient, q, k, v, out, lse)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_every_backend_has_a_row_and_a_choice():
    assert set(BACKENDS) == set(ATTENTION_KINDS) == set(AttentionChoice) - {"auto"}
    for name, kind in ATTENTION_KINDS.items():
        backend = BACKENDS[name]
        assert backend.name == name
        assert (backend.part_kernel is not None) is kind.in_parts
        assert bool(backend.compared) is (kind.needs_gpu or name == "sdpa")
