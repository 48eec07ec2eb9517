"""Adding adapters to weights, and taking them out again."""

from pathlib import Path

import pytest
import torch
from closeness import assert_close
from tiny_adapters import draw, factors, write_adapter
from tiny_weights import held, read

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.lora import Adapter, LowRank, merge, open_adapter
from opensora_cli.core.exceptions import CheckpointError


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "adapter"


@pytest.fixture
def weights():
    return {"block.proj.weight": draw(6, 5, seed=7), "block.proj.bias": draw(6, seed=8), "last.weight": draw(3, seed=9)}


@pytest.mark.parametrize(
    ("config", "rank", "scale"),
    [
        ({}, 2, 4.0),
        ({"lora_alpha": 3, "r": 4}, 4, 0.75),
        ({"use_rslora": True, "r": 4}, 4, 4.0),
        ({"rank_pattern": {"proj": 4}, "lora_alpha": 2}, 4, 0.5),
    ],
)
def test_scales_of_merged_updates(folder, weights, config, rank, scale):
    tensors = factors("block.proj", 6, 5, rank=rank)
    a, b = tensors.values()
    merged = merge(held(weights), open_adapter(write_adapter(folder, tensors, **config)))
    assert list(merged) == list(weights)
    expected = weights["block.proj.weight"].double() + scale * (b.double() @ a.double())
    assert_close(merged["block.proj.weight"].read().double(), expected)
    assert torch.equal(merged["block.proj.bias"].read(), weights["block.proj.bias"])


def merged(weight, *updates):
    """Return a weight to which updates were added."""
    adapter = Adapter(path=Path("a"), files=(), metadata={}, updates={"x": updates})
    return merge({"x": LazyTensor.of(weight)}, adapter)["x"].read()


def test_several_updates_of_a_weight_are_summed_before_the_rounding():
    ones = torch.ones(3, 2)
    small = LowRank(a=LazyTensor.of(ones[:1]), b=LazyTensor.of(ones[:, :1] * 2**-9), scale=1.0)
    # One after the other each would be rounded away.
    assert torch.equal(merged(ones.bfloat16(), *[small] * 4), torch.full((3, 2), 1 + 2**-7, dtype=torch.bfloat16))


def test_sums_that_fit_the_dtype_are_undone_exactly(folder, weights):
    weights["block.proj.weight"] = (weights["block.proj.weight"] * 4).round().bfloat16()
    tensors = {name: tensor.round() for name, tensor in factors("block.proj", 6, 5).items()}
    adapter = open_adapter(write_adapter(folder, tensors))
    merged = held(read(merge(held(weights), adapter)))
    back = read(merge(merged, adapter, scale=-1.0))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.items())


class TestModelsThatDoNotFit:
    def refused(self, folder, tensors, weights, words, hint="", **config):
        adapter = open_adapter(write_adapter(folder, tensors, **config))
        with pytest.raises(CheckpointError) as caught:
            merge(held(weights), adapter)
        assert words in caught.value.message
        assert hint in (caught.value.hint or "")
        assert caught.value.exit_code == 3

    def test_unknown_names_are_refused(self, folder, weights):
        tensors = {}
        for index in range(5):
            tensors |= factors(f"layer.{index}", 6, 5)
        words = "5 weights that are not in the model: layer.0.weight, layer.1.weight, layer.2.weight and 2 more"
        self.refused(folder, tensors, weights, words, "--rename")

    def test_other_shapes_are_refused(self, folder, weights):
        words = "does not fit the model: block.proj.weight [6, 5] (adapter: A [2, 6], B [6, 2])"
        self.refused(folder, factors("block.proj", 6, 6), weights, words)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
    def test_dtypes_of_8_bits_are_refused(self, folder, weights, dtype):
        weights["block.proj.weight"] = weights["block.proj.weight"].to(dtype)
        words = f"cannot be merged into {str(dtype).removeprefix('torch.')}: block.proj.weight"
        self.refused(folder, factors("block.proj", 6, 5), weights, words, "--dtype bf16")
