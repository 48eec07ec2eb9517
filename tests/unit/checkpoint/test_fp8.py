"""Weights in 8 bits and their scales."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_adapters import draw
from tiny_weights import read

from opensora_cli.checkpoint.fp8 import FP8_DTYPES, dequantize, quantize
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.core.exceptions import CheckpointError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def held(**tensors):
    return {name.replace("__", "."): LazyTensor.of(tensor) for name, tensor in tensors.items()}


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


QUANTIZED = draw(5, 6).to(E4M3)
PER_ROW = draw(5, seed=1)


class TestDequantize:
    @pytest.mark.parametrize(
        ("name", "scale", "factor"),
        [
            ("x.weight_scale", torch.tensor(0.3), torch.tensor(0.3)),
            ("x.weight_scale", torch.tensor([0.3]), torch.tensor(0.3)),
            ("x.weight_scale", PER_ROW, PER_ROW[:, None]),
            ("x.weight_scale", PER_ROW[:, None], PER_ROW[:, None]),
            ("x.weight_scale", torch.tensor([[0.3]], dtype=torch.bfloat16), torch.tensor(0.3).bfloat16().float()),
            ("x.scale_weight", torch.tensor(0.3), torch.tensor(0.3)),
            ("x.weight_scale_inv", torch.tensor([[0.3]]), torch.tensor(0.3)),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_all_names_of_scales_are_understood(self, name, scale, factor, dtype):
        entries = {
            "x.bias": LazyTensor.of(torch.ones(5)),
            "x.weight": LazyTensor.of(QUANTIZED),
            name: LazyTensor.of(scale),
        }
        result = read(dequantize(entries, dtype))
        assert list(result) == ["x.bias", "x.weight"]
        assert result["x.bias"].dtype == torch.float32
        expected = (QUANTIZED.float() * factor).to(dtype)
        assert torch.equal(result["x.weight"], expected)

    def test_blocks(self):
        weight, scale = draw(130, 257).to(E4M3), draw(2, 3, seed=1)
        expected = torch.empty(130, 257)
        for row in range(130):
            for block in range(3):
                part = slice(128 * block, 128 * (block + 1))
                expected[row, part] = weight[row, part].float() * scale[row // 128, block]
        result = dequantize(held(x__weight=weight, x__weight_scale_inv=scale), torch.float32)
        assert list(result) == ["x.weight"]
        assert torch.equal(result["x.weight"].read(), expected)

    @pytest.mark.parametrize(("scales", "factor"), [({}, 1), ({"scale_weight": torch.tensor(2.0)}, 2)])
    def test_names_without_a_module_and_tensors_without_a_scale(self, scales, factor):
        result = read(dequantize(held(weight=QUANTIZED, step=torch.tensor(3), **scales), torch.float16))
        assert list(result) == ["weight", "step"]
        assert torch.equal(result["weight"], QUANTIZED.half() * factor)
        assert result["step"].item() == 3

    def test_what_belongs_to_computing_in_8_bits_is_left_out(self):
        entries = held(
            scaled_fp8=torch.zeros(2, dtype=E4M3),
            x__weight=QUANTIZED,
            x__scale_weight=torch.tensor(2.0),
            x__scale_input=torch.tensor(2.0),
            y__scale_input=torch.tensor(5.0),
        )
        assert list(dequantize(entries, torch.float32)) == ["x.weight", "y.scale_input"]

    @pytest.mark.parametrize(
        "scale",
        [torch.ones(6), torch.ones(2, 5), torch.ones(5, dtype=torch.uint8), torch.ones(1, 6), torch.ones(0)],
    )
    def test_other_shapes_of_scales_are_refused(self, scale):
        with pytest.raises(CheckpointError, match=r"the scale of x\.weight \[5, 6\] is \w+ \["):
            dequantize(held(x__weight=QUANTIZED, x__weight_scale=scale), torch.float32)

    def test_two_scales_are_refused(self):
        entries = held(x__weight=QUANTIZED, x__weight_scale=torch.ones(1), x__scale_weight=torch.ones(1))
        with pytest.raises(CheckpointError, match=r"more than one scale: x\.weight_scale, x\.scale_weight"):
            dequantize(entries, torch.float32)


class TestQuantize:
    @pytest.mark.parametrize("dtype", [E4M3, E5M2])
    def test_values_are_the_nearest_of_8_bits(self, dtype):
        weight = draw(9, 11)
        weight[3, 4] = -6.0  # its magnitude is one of bfloat16: it must come back as it is
        result = read(quantize(held(x__weight=weight), dtype))
        assert list(result) == ["x.weight", "x.weight_scale"]
        values, scale = result["x.weight"], result["x.weight_scale"]
        assert (values.dtype, scale.dtype, scale.shape) == (dtype, torch.float32, ())
        assert scale.item() == pytest.approx(6 / torch.finfo(dtype).max, rel=1e-6)
        assert values.float().min() == -torch.finfo(dtype).max
        steps = torch.finfo(dtype).eps * weight.abs().clamp(min=1e-3) / 2
        assert ((values.float() * scale - weight).abs() <= steps * 1.01).all()

    def test_only_weights_of_linear_layers(self):
        entries = held(
            block__weight=draw(3, 4),
            block__bias=draw(3),
            norm__weight=draw(4),
            conv__weight=draw(3, 4, 1),
            pos_embed=draw(3, 4),
            token_embedding__weight=draw(3, 4),
            shared__weight=draw(3, 4),
            table__weight=torch.ones(3, 4, dtype=torch.int64),
            small__weight=draw(3, 4).to(E4M3),
        )
        result = quantize(entries, E4M3)
        changed = [name for name in result if name not in entries or result[name] is not entries[name]]
        assert changed == ["block.weight", "block.weight_scale"]

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_numbers_that_are_not_finite_are_refused(self, bad):
        weight = draw(30, 30, dtype=torch.bfloat16)
        weight[17, 3] = bad
        entries = quantize(held(x__weight=weight), E4M3)
        for name in ("x.weight", "x.weight_scale"):
            with pytest.raises(CheckpointError, match=r"^x\.weight has numbers that are not finite"):
                entries[name].read()


@settings(max_examples=60)
@given(data=st.data(), dtype=st.sampled_from([E4M3, E5M2]), through=st.sampled_from([torch.bfloat16, torch.float32]))
def test_back_and_forth_is_bit_equal(data, dtype, through):
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    magnitude = 2.0 ** data.draw(st.integers(-60, 60))
    weight = draw(rows, columns, seed=data.draw(st.integers(0, 1000))) * magnitude
    once = quantize({"x.weight": LazyTensor.of(weight)}, dtype)
    twice = quantize(dequantize(once, through), dtype)
    assert list(once) == list(twice)
    for name in once:
        assert torch.equal(bits(once[name].read()), bits(twice[name].read()))


@pytest.mark.parametrize("dtype", sorted(FP8_DTYPES, key=str))
def test_all_numbers_of_all_8_bit_dtypes_are_read(dtype):
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = dequantize(held(x__weight=numbers), torch.float32)["x.weight"].read()
    assert torch.equal(bits(values), bits(numbers.float()))
