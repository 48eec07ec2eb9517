"""Adding adapters to weights, and taking them out again."""

from pathlib import Path

import pytest
import torch
from closeness import assert_close
from tiny_adapters import draw, factors, write_adapter
from tiny_weights import held, read

from opensora_cli.checkpoint.formats.lora_file import open_adapter
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.lora import Adapter, LowRank, merge
from opensora_cli.core.exceptions import CheckpointError, RequestError


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "adapter"


@pytest.fixture
def weights():
    return {"block.proj.weight": draw(6, 5, seed=7), "block.proj.bias": draw(6, seed=8), "last.weight": draw(3, seed=9)}


class TestMerge:
    @pytest.mark.parametrize(
        ("config", "rank", "scale"),
        [
            ({}, 2, 4.0),
            ({"lora_alpha": 3, "r": 4}, 4, 0.75),
            ({"use_rslora": True, "r": 4}, 4, 4.0),
            ({"rank_pattern": {"other": 1, r"blo\w+\.proj": 4}, "alpha_pattern": {"block.proj": 2}}, 4, 0.5),
            ({"alpha_pattern": {"proj": 1.5, "block.proj": 100}}, 2, 0.75),
        ],
    )
    def test_scales(self, folder, weights, config, rank, scale):
        tensors = factors("block.proj", 6, 5, rank=rank)
        a, b = tensors.values()
        merged = merge(held(weights), open_adapter(write_adapter(folder, tensors, **config)))
        assert list(merged) == list(weights)
        expected = weights["block.proj.weight"].double() + scale * (b.double() @ a.double())
        assert_close(merged["block.proj.weight"].read().double(), expected)
        assert torch.equal(merged["block.proj.bias"].read(), weights["block.proj.bias"])

    @pytest.mark.parametrize("kernel", [(3, 3), (2, 3, 3), (4,)])
    def test_convolutions(self, folder, kernel):
        functions = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}
        convolve = functions[len(kernel)]
        weight, a, b = draw(6, 4, *kernel), draw(2, 4, *kernel, seed=1), draw(6, 2, *(1 for _ in kernel), seed=2)
        tensors = {"base_model.model.conv.lora_A.weight": a, "base_model.model.conv.lora_B.weight": b}
        adapter = open_adapter(write_adapter(folder, tensors))
        merged = merge({"conv.weight": LazyTensor.of(weight)}, adapter)["conv.weight"].read()
        inputs = draw(1, 4, *(5 for _ in kernel), seed=3)
        expected = convolve(inputs, weight) + 4 * convolve(convolve(inputs, a), b)
        assert_close(convolve(inputs, merged), expected, tolerance=1e-4)

    @pytest.mark.parametrize("table", [True, False])
    def test_weights_with_inputs_first(self, folder, table):
        names = ("lora_embedding_A", "lora_embedding_B") if table else ("lora_A.weight", "lora_B.weight")
        a, b = draw(2, 9, seed=1), draw(4, 2, seed=2)
        tensors = {f"base_model.model.words.{name}": tensor for name, tensor in zip(names, (a, b), strict=True)}
        weight = draw(9, 4)
        adapter = open_adapter(write_adapter(folder, tensors, fan_in_fan_out=not table))
        merged = merge({"words.weight": LazyTensor.of(weight)}, adapter)["words.weight"].read()
        assert_close(merged, weight + 4 * (b @ a).T)

    def test_tensors_that_were_trained_as_a_whole_are_replaced(self, folder, weights):
        weights = {name: tensor.half() for name, tensor in weights.items()}
        tensors = factors("block.proj", 6, 5) | {
            "base_model.model.last.weight": draw(3, seed=20),
            "base_model.model.block.proj.base_layer.bias": draw(6, seed=21),
        }
        adapter = open_adapter(write_adapter(folder, tensors, modules_to_save=["last"], bias="all"))
        merged = read(merge(held(weights), adapter))
        assert {tensor.dtype for tensor in merged.values()} == {torch.float16}
        assert torch.equal(merged["last.weight"], draw(3, seed=20).half())
        assert torch.equal(merged["block.proj.bias"], draw(6, seed=21).half())
        with pytest.raises(RequestError, match=r"cannot be unmerged: it replaced block\.proj\.bias, last\.weight"):
            merge(held(weights), adapter, subtract=True)

    def test_sums_that_would_become_infinite(self, folder, weights):
        weights["block.proj.weight"] = torch.full((6, 5), 6e4).half()
        tensors = {name: torch.full_like(tensor, 50.0) for name, tensor in factors("block.proj", 6, 5).items()}
        merged = merge(held(weights), open_adapter(write_adapter(folder, tensors)))
        with pytest.raises(CheckpointError, match=r"block\.proj\.weight has numbers that are too large for float16"):
            merged["block.proj.weight"].read()


def merged(weight, *updates):
    """Return a weight to which updates were added."""
    adapter = Adapter(path=Path("a"), files=(), metadata={}, updates={"x": updates}, replacements={})
    return merge({"x": LazyTensor.of(weight)}, adapter)["x"].read()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_sum_is_rounded_once(transposed, dtype):
    a, b = draw(3, 12), draw(40, 3, seed=1)
    weight = draw(*((12, 40) if transposed else (40, 12)), seed=2, dtype=dtype)
    update = LowRank(a=LazyTensor.of(a), b=LazyTensor.of(b), scale=0.7, transposed=transposed)
    change = (b.double() @ a.double()) * 0.7
    expected = weight.double() + (change.T if transposed else change)
    found = merged(weight, update)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, atol=1e-5, rtol=torch.finfo(dtype).eps)


def test_several_updates_of_a_weight_are_summed_before_the_rounding():
    ones = torch.ones(3, 2)
    small = LowRank(a=LazyTensor.of(ones[:1]), b=LazyTensor.of(ones[:, :1] * 2**-9), scale=1.0, transposed=False)
    # One after the other each would be rounded away.
    assert torch.equal(merged(ones.bfloat16(), *[small] * 4), torch.full((3, 2), 1 + 2**-7, dtype=torch.bfloat16))


class TestUnmerge:
    def test_sums_that_fit_the_dtype_are_undone_exactly(self, folder, weights):
        weights["block.proj.weight"] = (weights["block.proj.weight"] * 4).round().bfloat16()
        tensors = {name: tensor.round() for name, tensor in factors("block.proj", 6, 5).items()}
        adapter = open_adapter(write_adapter(folder, tensors))
        merged = held(read(merge(held(weights), adapter)))
        back = read(merge(merged, adapter, subtract=True))
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
        words = "5 tensors that are not in the model: layer.0.weight, layer.1.weight, layer.2.weight and 2 more"
        self.refused(folder, tensors, weights, words, "--rename")

    @pytest.mark.parametrize(
        ("columns", "config", "shapes"),
        [
            (6, {}, "block.proj.weight [6, 5] (adapter: A [2, 6], B [6, 2])"),
            (5, {"fan_in_fan_out": True}, "block.proj.weight [6, 5] (adapter: A [2, 5], B [6, 2])"),
            (5, {"modules_to_save": ["last"]}, "last.weight [3] (adapter: [4])"),
        ],
    )
    def test_other_shapes_are_refused(self, folder, weights, columns, config, shapes):
        tensors = factors("block.proj", 6, columns)
        if "modules_to_save" in config:
            tensors["base_model.model.last.weight"] = draw(4)
        self.refused(folder, tensors, weights, f"does not fit the model: {shapes}", **config)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
    def test_dtypes_of_8_bits_are_refused(self, folder, weights, dtype):
        weights["block.proj.weight"] = weights["block.proj.weight"].to(dtype)
        words = f"cannot be merged into {str(dtype).removeprefix('torch.')}: block.proj.weight"
        self.refused(folder, factors("block.proj", 6, 5), weights, words, "--dtype bf16")
