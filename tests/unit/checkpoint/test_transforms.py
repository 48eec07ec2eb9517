"""Other names, fewer tensors, another dtype, no 8-bit values."""

import pytest
import torch
from tiny_adapters import draw
from tiny_weights import read

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.transforms import FP8_DTYPES, cast, dequantize, drop, rename
from opensora_cli.core.exceptions import CheckpointError, RequestError


def entries(*names):
    return {name: LazyTensor.of(torch.full((2,), float(index))) for index, name in enumerate(names)}


NAMES = ("module.blocks.0.qkv.weight", "module.blocks.1.qkv.weight", "module.head.bias", "step")


class TestRename:
    @pytest.mark.parametrize(
        ("rules", "expected"),
        [
            (["module.="], ["blocks.0.qkv.weight", "blocks.1.qkv.weight", "head.bias", "step"]),
            (["module.blocks=layers"], ["layers.0.qkv.weight", "layers.1.qkv.weight", "module.head.bias", "step"]),
            (["=model."], [f"model.{name}" for name in NAMES]),
            (["module.=", "head=tail"], ["blocks.0.qkv.weight", "blocks.1.qkv.weight", "tail.bias", "step"]),
            ([], list(NAMES)),
        ],
    )
    def test_names_change_and_order_and_tensors_stay(self, rules, expected):
        given = entries(*NAMES)
        renamed = rename(given, rules)
        assert list(renamed) == expected
        assert list(renamed.values()) == list(given.values())

    @pytest.mark.parametrize(
        ("rules", "words"),
        [
            (["modul"], "'modul' must be OLD=NEW"),
            (["modul.=x"], "'modul.=x' matches no tensor; there is, for example, module.blocks.0.qkv.weight"),
            (["module.=", "module.="], "'module.=' matches no tensor"),
            (["module.head.bias=step"], "gives two tensors the same name: step"),
            (["step="], "leaves nothing of the name step"),
            (["step=evil\x1b[2J\n", "module.head.bias=evil\x1b[2J\n"], r"the same name: 'evil\x1b[2J\n'"),
        ],
    )
    def test_refused(self, rules, words):
        with pytest.raises(RequestError) as caught:
            rename(entries(*NAMES), rules)
        assert words in caught.value.message
        assert "\n" not in caught.value.message


def test_a_pattern_drops_the_tensors_that_match():
    given = entries(*NAMES)
    assert list(drop(given, ["*.0.*", "step"])) == [NAMES[1], NAMES[2]]
    with pytest.raises(RequestError, match=r"drop='\*\.9\.\*' matches no tensor"):
        drop(given, ["step", "*.9.*"])
    with pytest.raises(RequestError, match="there are none"):
        drop({}, ["*"])


def test_cast_leaves_whole_numbers_and_what_fits():
    given = {
        "float": LazyTensor.of(torch.tensor([1.0 + 2**-9])),
        "half": LazyTensor.of(torch.tensor([1.5], dtype=torch.bfloat16)),
        "count": LazyTensor.of(torch.tensor([7])),
        "mask": LazyTensor.of(torch.tensor([True])),
    }
    changed = cast(given, torch.bfloat16)
    assert list(changed) == list(given)
    assert [entry.dtype for entry in changed.values()] == [torch.bfloat16, torch.bfloat16, torch.int64, torch.bool]
    assert changed["float"].read().item() == 1.0
    assert all(changed[name] is given[name] for name in ("half", "count", "mask"))


E4M3 = torch.float8_e4m3fn


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

    def test_scales_of_blocks_are_refused(self):
        entries = held(x__weight=QUANTIZED, x__weight_scale_inv=torch.ones(1, 2))
        with pytest.raises(CheckpointError, match=r"the scale of x\.weight \[5, 6\] is float32 \[1, 2\]"):
            dequantize(entries, torch.float32)

    def test_two_scales_are_refused(self):
        entries = held(x__weight=QUANTIZED, x__weight_scale=torch.ones(1), x__scale_weight=torch.ones(1))
        with pytest.raises(CheckpointError, match=r"more than one scale: x\.weight_scale, x\.scale_weight"):
            dequantize(entries, torch.float32)


@pytest.mark.parametrize("dtype", sorted(FP8_DTYPES, key=str))
def test_all_numbers_of_all_8_bit_dtypes_are_read(dtype):
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = dequantize(held(x__weight=numbers), torch.float32)["x.weight"].read()
    assert torch.equal(bits(values), bits(numbers.float()))
