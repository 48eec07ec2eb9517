"""Weights in 8 bits: half the bytes, bounded errors, and the same numbers streamed or not."""

import pytest
import torch
from tiny_transformer import inputs, transformer
from torch import nn

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.memory.eight_bit import store_in_fp8
from opensora_cli.memory.host_weights import slot_bytes

pytestmark = pytest.mark.usefixtures("no_gradients")


def stored(weight, dtype=torch.float32):
    """Return a layer of this weight whose 8 bits are known."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=dtype)
    layer.weight.copy_(weight)
    wrapped = nn.Sequential(layer)
    store_in_fp8(wrapped)
    return wrapped[0]


def draw(*shape, scale=0.02):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale


class TestNumbers:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_the_rounding_error_is_bounded(self, dtype):
        # Rows of very different magnitudes: a scale for all of them would cost the small ones their digits.
        weight = (draw(256, 512) * torch.logspace(-6, 1, 256)[:, None]).to(dtype).float()
        layer = stored(weight, dtype)
        assert layer.weight.dtype == dtype
        error = (layer.weight.float() - weight).abs()
        # Half of the last of three bits; below 2^-14 of a row's largest number the steps have one size.
        smallest = weight.abs().amax(dim=1, keepdim=True) * 2**-14
        assert (error <= torch.maximum(weight.abs(), smallest) / 16).all()
        relative = error.norm(dim=1) / weight.norm(dim=1)
        assert relative.min() > 0.02
        assert relative.max() < 0.03

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
    def test_what_is_not_finite_is_refused(self, number):
        weight = draw(8, 8)
        weight[3, 4] = number
        with pytest.raises(CheckpointError, match="not finite"):
            stored(weight)


class TestModel:
    def blocks(self, model):
        return [*model.double_blocks, *model.single_blocks]

    def test_a_transformer_in_8_bits_is_close(self):
        plain = transformer(hidden=64).bfloat16().requires_grad_(False).eval()
        model = transformer(hidden=64).bfloat16().requires_grad_(False).eval()
        names = list(model.state_dict())
        before = sum(slot_bytes(block) for block in self.blocks(model))
        for block in self.blocks(model):
            store_in_fp8(block)
        state = model.state_dict()
        added = [name for name in state if name not in names]
        assert [name for name in state if name in names] == names
        assert {name.removesuffix("_scale") for name in added} < set(names)
        linears = [name for name in names if "blocks" in name and name.endswith(".weight")]
        assert [name + "_scale" for name in linears] == added
        assert all(state[name].dtype == torch.float8_e4m3fn for name in linears)
        # Scales and alignment: 4 bytes a row of 64 or 256 weights.
        after = sum(slot_bytes(block) for block in self.blocks(model))
        assert 0.5 * before < after < 0.56 * before
        exact, near = plain(**inputs(plain)), model(**inputs(model))
        error = (near - exact).norm() / exact.norm()
        assert 0 < error < 0.1

        other = transformer(hidden=64).bfloat16()
        for block in self.blocks(other):
            store_in_fp8(block)
        other.load_state_dict(state)
        assert torch.equal(other(**inputs(other)), near)
