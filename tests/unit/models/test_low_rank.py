"""Low-rank updates beside linear layers."""

import pytest
import torch
from closeness import assert_close
from torch import Tensor, nn

from opensora_cli.memory.eight_bit import Fp8Linear, store_in_fp8
from opensora_cli.memory.streaming import stream_blocks
from opensora_cli.models.linears import LowRankLinear


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(*, bias: bool = True) -> LowRankLinear:
    linear = nn.Linear(5, 7, bias=bias).requires_grad_(False)
    for seed, weight in enumerate(linear.parameters()):
        weight.copy_(draw(*weight.shape, seed=seed))
    return LowRankLinear(linear, draw(3, 5, seed=3), draw(7, 3, seed=4))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)])
def test_it_computes_with_the_sum(bias, shape):
    low_rank, features = layer(bias=bias), draw(*shape, seed=5)
    weight = low_rank.base.weight + low_rank.lora_b @ low_rank.lora_a
    expected = nn.functional.linear(features, weight, low_rank.base.bias)
    assert_close(low_rank(features), expected)
    assert_close(low_rank.weight, weight)
    assert low_rank.bias is low_rank.base.bias


def test_the_weight_itself_and_the_input_stay():
    low_rank, features = layer(), draw(4, 5, seed=5)
    before = low_rank.base.weight.clone(), features.clone()
    low_rank(features)
    _ = low_rank.weight
    assert torch.equal(low_rank.base.weight, before[0])
    assert torch.equal(features, before[1])


def test_beside_a_weight_in_8_bits_it_is_not_rounded():
    block = nn.ModuleDict({"proj": layer()})
    features = draw(4, 5, seed=5)
    change = block["proj"](features) - block["proj"].base(features)
    store_in_fp8(block)
    assert isinstance(block["proj"].base, Fp8Linear)
    assert_close(block["proj"](features) - block["proj"].base(features), change)
    assert_close(block["proj"].weight, block["proj"].base.weight + block["proj"].lora_b @ block["proj"].lora_a)


@pytest.mark.parametrize("source", ["pinned", "mapped"])
def test_it_comes_and_goes_with_its_block(source):
    blocks = nn.ModuleList([nn.Sequential(layer()), nn.Sequential(nn.Linear(7, 5).requires_grad_(False))])
    features = draw(4, 5, seed=5)
    expected = blocks[1](blocks[0](features))
    with torch.inference_mode(), stream_blocks([blocks], device="cpu", resident=1, source=source):
        found = blocks[1](blocks[0](features))
    assert torch.equal(found, expected)
