"""Matmuls in 8 bits: exact sums of rounded numbers, the error of rounding, and one byte per weight."""

import pytest
import torch
from storage_sizes import storage_bytes
from torch import nn

from opensora_cli.core.choices import LinearProducts
from opensora_cli.memory.eight_bit import INT8_LARGEST, ProductLinear, use_products

pytestmark = pytest.mark.usefixtures("no_gradients")

INT8, FP8 = LinearProducts.INT8, LinearProducts.FP8


def draw(*shape, scale=1.0, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def block_of(*sizes, bias=True, dtype=torch.float32):
    """Return layers of these sizes (out, in) side by side."""
    block = nn.ModuleList(nn.Linear(wide, out, bias=bias, dtype=dtype) for out, wide in sizes)
    for number, layer in enumerate(block):
        layer.weight.copy_(draw(*layer.weight.shape, scale=0.02, seed=number))
        if bias:
            layer.bias.copy_(draw(len(layer.bias), seed=number))
    return block


def int8_block(block):
    use_products(block, [str(index) for index in range(len(block))], INT8)
    return block


@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_sums_are_those_of_integers(tokens):
    (layer,) = int8_block(block_of((40, 300), bias=False))
    features = draw(tokens, 300)
    values, scale = layer.round_input(features)
    sums = values.long() @ layer._parameters["weight"].long().t()
    expected = (sums.double() * scale.double() * layer.weight_scale.double().t()).float()
    assert torch.allclose(layer(features), expected, rtol=1e-6, atol=0)


def test_inputs_are_rounded_to_the_nearest_of_255_numbers_a_token():
    (layer,) = int8_block(block_of((8, 1000)))
    features = draw(5, 1000) * torch.logspace(-20, 20, 5)[:, None]
    values, scale = layer.round_input(features)
    error = (values.float() * scale - features).abs()
    assert (error <= 0.5001 * features.abs().amax(dim=1, keepdim=True) / INT8_LARGEST).all()
    assert values.min() >= -127
    zero, _ = layer.round_input(torch.zeros(1, 1000))
    assert (zero == 0).all()


def test_a_weight_takes_a_byte_and_keeps_its_names():
    block = block_of((96, 256))
    names = [name for name, _ in block.named_parameters()]
    int8_block(block)
    assert storage_bytes(block.parameters()) == 96 * 256 + 4 * 96 + 4 * 96
    assert sorted(name for name, _ in block.named_parameters()) == sorted([*names, "0.weight_scale"])
    assert block[0].weight.dtype is torch.float32
    assert (block[0].weight - block_of((96, 256))[0].weight).norm() < 0.03 * block[0].weight.norm()


def test_fp8_rounds_inputs_and_weights_by_rows():
    block = block_of((32, 64))
    use_products(block, ["0"], FP8)
    layer = block[0]
    assert isinstance(layer, ProductLinear)
    values, scale = layer.round_input(draw(5, 64) * torch.logspace(-20, 20, 5)[:, None])
    assert values.dtype is torch.float8_e4m3fn
    assert (values.float().abs().amax(dim=1) == torch.finfo(torch.float8_e4m3fn).max).all()
    assert scale.shape == (5, 1)


class _GpuProducts:
    """Do what the kernels of a GPU do, on the CPU; other devices' tensors are of the meta device there."""

    def __init__(self):
        self.calls = []

    def int_mm(self, values, weight):
        self.calls.append((values.shape, values.dtype, weight.dtype))
        return (values.long() @ weight.long()).int()

    def scaled_mm(self, values, weight, *, scale_a, scale_b, bias, out_dtype, use_fast_accum):
        assert weight.stride(0) == 1  # by columns
        assert (scale_a.shape, scale_b.shape) == ((len(values), 1), (1, weight.shape[1]))
        assert use_fast_accum
        self.calls.append((values.shape, values.dtype, weight.dtype))
        return ((values.float() @ weight.float()) * scale_a * scale_b + bias.float()).to(out_dtype)


@pytest.mark.parametrize(("kind", "dtype"), [(INT8, torch.int8), (FP8, torch.float8_e4m3fn)])
@pytest.mark.parametrize("tokens", [3, 40])
def test_kernels_of_a_gpu_get_what_they_take(monkeypatch, kind, dtype, tokens):
    kernels = _GpuProducts()
    monkeypatch.setattr(torch, "_int_mm", kernels.int_mm)
    monkeypatch.setattr(torch, "_scaled_mm", kernels.scaled_mm)
    block = block_of((48, 64), dtype=torch.bfloat16)
    given = draw(tokens, 64).to(torch.bfloat16)
    expected = block[0](given)
    use_products(block, ["0"], kind)
    assert 0 < (block[0](given) - expected).norm() < 0.05 * expected.norm()
    [(shape, of_values, of_weight)] = kernels.calls
    assert (of_values, of_weight) == (dtype, dtype)
    # `torch._int_mm` refuses fewer than 17 rows.
    assert shape == (max(tokens, 32) if kind is INT8 else tokens, 64)
