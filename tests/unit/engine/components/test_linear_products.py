"""Matmuls in 8 bits: refused without a kernel that works, and close to the exact ones."""

from unittest import mock

import pytest
import torch
from tiny_transformer import inputs, linears_of_blocks, transformer

from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.engine.components import linear_products
from opensora_cli.engine.components.linear_products import (
    require_products,
    use_in_block,
)
from opensora_cli.memory import eight_bit as eight_bit_products
from opensora_cli.memory.eight_bit import ProductLinear
from opensora_cli.models.linears import LowRankLinear
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig

INT8, FP8 = LinearProducts.INT8, LinearProducts.FP8
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    why_unusable = linear_products._why_unusable
    why_unusable.cache_clear()
    with torch.no_grad():
        yield
    why_unusable.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    def has(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")

    return has


def require(kind, config=None, *, device=GPU, dtype=torch.bfloat16, **options):
    require_products(kind, config or MMDiTConfig(), device=device, dtype=dtype, **options)


def in_8_bits(model, kind=INT8):
    for stack in repeated_blocks(model.config):
        for block in model.get_submodule(stack.module_path):
            use_in_block(block, stack, kind)


@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("device", [CPU, torch.device("xpu")])
def test_other_devices_are_refused(kind, device):
    with pytest.raises(HardwareError, match="needs an NVIDIA GPU") as error:
        require(kind, device=device)
    assert "precision.linear=exact" in error.value.hint


@pytest.mark.parametrize(
    ("kind", "capability", "hint"), [(INT8, (7, 5), "exact"), (FP8, (8, 6), "int8"), (FP8, (7, 0), "exact")]
)
def test_a_gpu_that_is_too_old_is_refused(gpu, kind, capability, hint):
    gpu(*capability)
    with pytest.raises(HardwareError, match="compute capability") as error:
        require(kind, tries_device=False)
    assert hint in error.value.hint
    gpu(8, 9)
    require(kind, tries_device=False)


def test_fp8_needs_bfloat16_and_sizes_that_its_kernel_takes():
    with pytest.raises(RequestError, match="bfloat16"):
        require(FP8, dtype=torch.float16)
    require(FP8, tensor=3)
    # 12,288 features of the MLP are 2,458 on a rank of five.
    with pytest.raises(RequestError, match="multiples of 16"):
        require(FP8, tensor=5)


def test_a_wrong_or_missing_kernel_is_refused(gpu, monkeypatch):
    why_unusable, multiply = linear_products._why_unusable, eight_bit_products._int_mm
    assert why_unusable(INT8, CPU, torch.bfloat16) is None
    monkeypatch.setattr(linear_products, "_why_unusable", lambda kind, _, dtype: why_unusable(kind, CPU, dtype))
    why_unusable.cache_clear()
    gpu(8, 9)
    monkeypatch.setattr(eight_bit_products, "_int_mm", lambda *given: multiply(*given) * 2)
    with pytest.raises(HardwareError, match=r"a small product is off by \d+") as error:
        require(INT8)
    assert "exact" in error.value.hint
    why_unusable.cache_clear()
    monkeypatch.setattr(eight_bit_products, "_int_mm", mock.Mock(side_effect=NotImplementedError("no such operator")))
    with pytest.raises(HardwareError, match="no such operator"):
        require(INT8)


def test_an_evaluation_has_a_small_error_and_chunks_change_only_rounding():
    model = transformer(hidden=64)
    exact = model(**inputs(model))
    in_8_bits(model)
    whole = model(**inputs(model))
    assert 0 < (whole - exact).norm() < 0.1 * exact.norm()
    model.set_sequence_chunk(5)
    assert torch.allclose(model(**inputs(model)), whole, rtol=1e-3, atol=1e-3 * float(whole.abs().max()))
    assert all(module.last._rounded is None for module in model.modules() if isinstance(module, ProductLinear))


@pytest.mark.parametrize("chunk", [None, 5])
def test_adapters_beside_the_layers_stay_exact(chunk):
    """Half of each weight is in the layer and half in an adapter: only the layer is rounded."""
    plain, model = transformer(hidden=64), transformer(hidden=64)
    for path in linears_of_blocks(model.config):
        weight = model.get_submodule(path).weight
        plain.get_submodule(path).weight.mul_(2)
        model.set_submodule(path, LowRankLinear(model.get_submodule(path), weight.clone(), torch.eye(len(weight))))
    in_8_bits(model)
    for each in (plain, model):
        each.set_sequence_chunk(chunk)
    expected = plain(**inputs(plain))
    assert 0 < (model(**inputs(model)) - expected).norm() < 0.1 * expected.norm()
