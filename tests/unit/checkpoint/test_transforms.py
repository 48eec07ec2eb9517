"""Other names, fewer tensors, another dtype."""

import pytest
import torch

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.transforms import cast, drop, only, rename
from opensora_cli.core.exceptions import RequestError


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
            ([r"re:blocks\.(\d+)=b\1"], ["module.b0.qkv.weight", "module.b1.qkv.weight", "module.head.bias", "step"]),
            ([r"re:^(?P<all>s.*)$=x.\g<all>"], [*NAMES[:3], "x.step"]),
            ([r"re:o(?=ck)=0"], ["module.bl0cks.0.qkv.weight", "module.bl0cks.1.qkv.weight", *NAMES[2:]]),
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
            (
                [r"re:blocks\.\d+=b"],
                r"module.blocks.0.qkv.weight and module.blocks.1.qkv.weight the same name: module.b.",
            ),
            (["module.head.bias=step"], "gives module.head.bias and step the same name: step"),
            (["step="], "leaves nothing of the name step"),
            (["step=evil\x1b[2J\n", "module.head.bias=evil\x1b[2J\n"], r"the same name: 'evil\x1b[2J\n'"),
            (["re:(=x"], "is no regular expression"),
            ([r"re:step=\2"], "cannot be filled in"),
            ([r"re:step=\g<x>"], "cannot be filled in"),
        ],
    )
    def test_refused(self, rules, words):
        with pytest.raises(RequestError) as caught:
            rename(entries(*NAMES), rules)
        assert words in caught.value.message
        assert "\n" not in caught.value.message


class TestSelect:
    def test_only_and_drop_are_complements(self):
        given = entries(*NAMES)
        patterns = ["*.0.*", "step"]
        assert list(only(given, patterns)) == [NAMES[0], NAMES[3]]
        assert list(drop(given, patterns)) == [NAMES[1], NAMES[2]]

    @pytest.mark.parametrize("select", [only, drop])
    def test_a_pattern_that_matches_nothing_is_an_error(self, select):
        with pytest.raises(RequestError, match=rf"{select.__name__}='\*\.9\.\*' matches no tensor"):
            select(entries(*NAMES), ["step", "*.9.*"])
        with pytest.raises(RequestError, match="there are none"):
            select({}, ["*"])


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
