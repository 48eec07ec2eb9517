"""The files of adapters: what cannot be merged, what is broken, and what is hostile."""

import os
import re

import pytest
from tiny_adapters import draw, factors, write_adapter

from opensora_cli.checkpoint.formats.lora_file import open_adapter
from opensora_cli.checkpoint.formats.peft import values_by_name
from opensora_cli.core.exceptions import CheckpointError, RequestError


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "adapter"


class TestPatterns:
    @pytest.mark.parametrize(
        "pattern", ["a.b", r"a\.b", "a*b", r"\w+", "[ab].*", "^a.?b", "x(a|b)", r".*\.(?:b|c)$", "a|b"]
    )
    def test_they_mean_what_they_mean_to_re(self, pattern):
        names = ["a", "b", "ab", "a.b", "aab", "xa", "c.xb", "x.a.b", "b.a", "x.c.b", "axb"]
        plain = pattern == "a.b"
        expected = [
            re.match(rf"(.*\.)?({re.escape(pattern) if plain else pattern})$", name) is not None for name in names
        ]
        found = values_by_name({pattern: 1}, names)
        assert [name in found for name in names] == expected

    @pytest.mark.parametrize(
        "pattern",
        ["(?i)a", "(a+)+b", "(a|b)*", "a{5}", r"(a)\1", "((a))", "(?=a)", "[^a]", "a**", "(a|b)" * 7, "a*b*c*d*", "*a"],
    )
    def test_what_could_take_years_is_refused(self, pattern):
        with pytest.raises(ValueError, match="is refused"):
            values_by_name({pattern: 1}, [])

    def test_the_first_that_matches_counts(self):
        names = ("x.proj", "a.x.proj", "y.proj", "proj", "proj.")
        values = values_by_name({"x.proj": 1, r"\w+": 2, "proj": 3, "^y.proj$": 4}, names)
        assert values == {"x.proj": 1, "a.x.proj": 1, "y.proj": 2, "proj": 2}
        names = ("y.proj", "x.y.proj")
        assert values_by_name({"^y.proj$": 4, "proj": 3}, names) == {"y.proj": 4, "x.y.proj": 3}


class TestBrokenAdapters:
    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"peft_type": "LOHA"}, "peft_type='LOHA' is no LoRA"),
            ({"use_dora": True}, "use_dora (DoRA)"),
            ({"lora_bias": True}, "lora_bias"),
            ({"target_parameters": ["experts"]}, "target_parameters"),
            ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16' has changed the weights"),
            ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ],
    )
    def test_features_that_cannot_be_merged(self, folder, config, words):
        with pytest.raises(RequestError) as caught:
            open_adapter(write_adapter(folder, factors("block.proj", 6, 5), **config))
        assert words in caught.value.message
        assert caught.value.exit_code == 2

    def test_tensors_of_other_kinds(self, folder):
        tensors = factors("block.proj", 6, 5)
        vector = {"base_model.model.block.proj.lora_magnitude_vector": draw(6)}
        with pytest.raises(RequestError, match=r"lora_magnitude_vector.*cannot be merged"):
            open_adapter(write_adapter(folder, tensors | vector))
        with pytest.raises(CheckpointError, match=r"not of LoRA: block\.norm\.weight"):
            open_adapter(write_adapter(folder, tensors | {"base_model.model.block.norm.weight": draw(6)}))

    @pytest.mark.parametrize(
        "config",
        [
            *({"r": value} for value in (0, True, "2", 10**400)),
            *({"lora_alpha": value} for value in (None, [1], 10**400, -1e300, {"a\nb": []})),
            *({"rank_pattern": value} for value in ([1], {"proj": 1.5}, {"proj": 10**400})),
            *({"rank_pattern": {name: 2}} for name in ("(", "(?i)proj", "(" * 3000 + "a" + ")" * 3000, "(.+)+x")),
            *({"alpha_pattern": {name: 2}} for name in ("(a+)+b", "[z-a]")),
            {"alpha_pattern": {"proj": "much"}},
            {"alpha_pattern": {f"{number}+": 2 for number in range(101)}},
        ],
    )
    def test_values(self, folder, config):
        with pytest.raises(CheckpointError, match=r"adapter_config\.json: ") as caught:
            open_adapter(write_adapter(folder, factors("block.proj", 6, 5), **config))
        assert "\n" not in caught.value.message

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
    @pytest.mark.parametrize("kind", ["link", "device", "pipe", "folder"])
    def test_files_that_are_none_or_lie_elsewhere(self, kind, name, folder, tmp_path):
        path = write_adapter(folder, factors("block.proj", 6, 5)) / name
        path.rename(tmp_path / name)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero" if kind == "device" else tmp_path / name)
        with pytest.raises(CheckpointError, match=r"is a link out of its folder|is not a file"):
            open_adapter(folder)

    def test_more_names_than_can_be_matched(self, folder):
        with pytest.raises(CheckpointError, match="of too long a name"):
            open_adapter(write_adapter(folder, factors("a." * 1000 + "x", 6, 5)))
        tensors = {}
        for number in range(20):
            tensors |= factors(f"{number}." + "a" * 900, 1, 1)
        patterns = {f".*a*a*{number}": 1 for number in range(50)}
        with pytest.raises(CheckpointError, match="too many regular expressions for so many modules"):
            open_adapter(write_adapter(folder, tensors, alpha_pattern=patterns))

    def test_missing_files(self, folder):
        write_adapter(folder, factors("block.proj", 6, 5))
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
        with pytest.raises(
            CheckpointError, match=r"has adapter_model\.bin and no adapter_model\.safetensors"
        ) as caught:
            open_adapter(folder)
        assert "osora ckpt convert" in caught.value.hint
        (folder / "adapter_config.json").unlink()
        with pytest.raises(CheckpointError, match=r"adapter_config\.json does not exist"):
            open_adapter(folder)

    @pytest.mark.parametrize(
        ("tensors", "words"),
        [
            ({}, "has no lora_A and lora_B"),
            (factors("x", 6, 5, rank=3), r"A [3, 5] and B [6, 3], which are not of rank 2"),
        ],
    )
    def test_weights(self, folder, tensors, words):
        with pytest.raises(CheckpointError) as caught:
            open_adapter(write_adapter(folder, tensors))
        assert words in caught.value.message
