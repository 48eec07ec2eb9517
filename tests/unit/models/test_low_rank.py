"""Low-rank updates beside linear layers."""

import pytest
import torch
from closeness import assert_close
from torch import Tensor, nn

from opensora_cli.memory.eight_bit import Fp8Linear, store_in_fp8
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


def test_beside_a_weight_in_8_bits_it_is_not_rounded():
    block = nn.ModuleDict({"proj": layer()})
    features = draw(4, 5, seed=5)
    change = block["proj"](features) - block["proj"].base(features)
    store_in_fp8(block)
    assert isinstance(block["proj"].base, Fp8Linear)
    assert_close(block["proj"](features) - block["proj"].base(features), change)
    assert_close(block["proj"].weight, block["proj"].base.weight + block["proj"].lora_b @ block["proj"].lora_a)
