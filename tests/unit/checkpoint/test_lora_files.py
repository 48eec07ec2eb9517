"""Files of adapters: what they are by their names, their scales, and what is refused, broken or hostile."""

import json
import os
from pathlib import Path

import pytest
import torch
from adapter_styles import STYLES, dotted, kohya
from safetensors.torch import save_file
from tiny_adapters import draw, factors, write_adapter

from opensora_cli.checkpoint.lora import open_adapter, style_of
from opensora_cli.core.exceptions import CheckpointError, RequestError

PAIR = {"block.proj": (draw(2, 5), draw(6, 2, seed=1))}


def written(folder: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> Path:
    path = folder / "a.safetensors"
    save_file(tensors, path, metadata=metadata or None)
    return path


def test_styles_are_recognized_by_their_names():
    fused = {"double_blocks.0.img_attn.qkv": (draw(2, 5), draw(15, 2))}
    found = {style: style_of(tensors(fused, 5)) for style, tensors in STYLES.items()}
    assert found == {
        "fused": "diffusers",
        "fused .default": "diffusers",
        "ComfyUI": "ComfyUI",
        "ComfyUI lora_down": "ComfyUI",
        "lora.down": "diffusers",
        "kohya": "kohya",
        "diffusers": "diffusers",
        "diffusers in kohya's spelling": "kohya",
    }
    assert style_of(factors("x", 6, 5)) == "PEFT"
    assert style_of(["img_in.weight", "double_blocks.0.img_mod.lin.weight"]) is None


class TestScales:
    def scale(self, path: Path) -> float:
        ((update,),) = open_adapter(path).updates.values()
        return update.scale

    @pytest.mark.parametrize(
        "name", ["alpha", "lora_alpha", "network_alpha", "transformer.lora_alpha", "ss_network_alpha"]
    )
    def test_alpha_of_the_metadata_is_divided_by_the_rank(self, tmp_path, name):
        assert self.scale(written(tmp_path, dotted(PAIR, alpha=None), **{name: "8"})) == 4.0
        assert self.scale(written(tmp_path, dotted(PAIR, alpha=None), **{name: "None"})) == 1.0

    def test_the_alpha_of_a_layer_goes_first(self, tmp_path):
        assert self.scale(written(tmp_path, dotted(PAIR, alpha=8.0), ss_network_alpha="2")) == 4.0

    @pytest.mark.parametrize(
        ("alpha", "scale"), [(None, 1.0), (2, 1.0), (8.0, 4.0), (torch.tensor([1.0]).bfloat16(), 0.5), (0, 0.0)]
    )
    def test_alpha_is_divided_by_the_rank(self, tmp_path, alpha, scale):
        tensors = dotted(PAIR, alpha=None)
        tensors |= {"block.proj.alpha": torch.as_tensor(alpha)} if alpha is not None else {}
        assert self.scale(written(tmp_path, tensors)) == scale

    @pytest.mark.parametrize(
        ("config", "scale"),
        [
            ({"transformer.r": 2, "transformer.lora_alpha": 8, "text_encoder.lora_alpha": 100}, 4.0),
            ({"r": 2, "lora_alpha": 8, "alpha_pattern": {}}, 4.0),
            ({"transformer.lora_alpha": 8, "transformer.use_rslora": True}, 8 / 2**0.5),
            ({"text_encoder.r": 2, "text_encoder.lora_alpha": 100}, 1.0),
        ],
    )
    def test_diffusers_notes_it_in_the_metadata(self, tmp_path, config, scale):
        tensors = dotted(PAIR, prefix="transformer.", alpha=None)
        assert self.scale(written(tmp_path, tensors, lora_adapter_metadata=json.dumps(config))) == scale


class TestPlaces:
    def test_the_folder_that_diffusers_saves(self, tmp_path):
        written(tmp_path, dotted(PAIR)).rename(tmp_path / "pytorch_lora_weights.safetensors")
        adapter = open_adapter(tmp_path)
        assert adapter.files == (tmp_path / "pytorch_lora_weights.safetensors",)

    def test_the_files_of_peft_under_any_name(self, tmp_path):
        folder = write_adapter(tmp_path / "a", factors("block.proj", 6, 5))
        weights = folder / "adapter_model.safetensors"
        expected = (folder / "adapter_config.json", weights)
        assert [open_adapter(path).files for path in (folder, weights)] == [expected, expected]
        weights.rename(folder / "style.safetensors")
        assert open_adapter(folder / "style.safetensors").updates
        (folder / "adapter_config.json").unlink()
        with pytest.raises(CheckpointError, match=r"adapter_config\.json does not exist"):
            open_adapter(folder / "style.safetensors")


class TestRefused:
    @pytest.mark.parametrize(
        ("tensors", "words"),
        [
            ({}, "it is no adapter"),
            ({"img_in.weight": draw(6, 5)}, "it is no adapter"),
            *(
                (kohya(PAIR) | {name: draw(2, 2)}, f"1 tensors that are not of LoRA: {name}")
                for name in ("note", "lora_unet_x.dora_scale", "x.lora_B.bias", "x.lora_mid.weight", "x.diff_b")
            ),
            ({"lora_unet_x.hada_w1_a": draw(2, 2)}, "it is no adapter"),
            (kohya(PAIR) | {"lora_unet_other.alpha": draw(1)}, "not of LoRA: lora_unet_other.alpha"),
            ({"x.lora_A.weight": draw(2, 5)}, "'x' has one of its two matrices and not the other"),
            (dotted({"x": (draw(3, 5), draw(6, 2))}), "A [3, 5] and B [6, 2], no matrices of a common rank"),
            (dotted({"x": (draw(0, 5), draw(6, 0))}), "no matrices of a common rank"),
            (dotted({"x": (draw(5), draw(6))}), "no matrices of a common rank"),
            (dotted({"x": (draw(2, 5, 3), draw(6, 2, 1))}), "no matrices of a common rank"),
            ({name: draw.to(torch.float8_e4m3fn) for name, draw in dotted(PAIR).items()}, "not of 16 bits or more"),
            (dotted(PAIR, alpha=float("nan")), "must be a number up to 1,000,000, and is NaN"),
            (dotted(PAIR, alpha=1e30), "must be a number up to"),
            (dotted(PAIR, alpha=None) | {"block.proj.alpha": draw(2)}, "[2] must be a single number"),
        ],
    )
    def test_tensors_that_do_not_fit_together(self, tmp_path, tensors, words):
        with pytest.raises(CheckpointError) as caught:
            open_adapter(written(tmp_path, tensors))
        assert words in caught.value.message

    @pytest.mark.parametrize("text", ["", "[]", '{"lora_alpha": "much"}'])
    def test_broken_metadata(self, tmp_path, text):
        with pytest.raises(CheckpointError, match=r"a\.safetensors: "):
            open_adapter(written(tmp_path, dotted(PAIR, alpha=None), lora_adapter_metadata=text))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "adapter"


class TestBrokenAdapters:
    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"peft_type": "LOHA"}, "peft_type='LOHA' is no LoRA"),
            ({"use_dora": True}, "an adapter with use_dora cannot be added"),
            ({"modules_to_save": ["last"]}, "modules_to_save"),
            ({"alpha_pattern": {"proj": 1}}, "alpha_pattern"),
            ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16' has changed the weights"),
        ],
    )
    def test_features_that_cannot_be_added(self, folder, config, words):
        with pytest.raises(RequestError) as caught:
            open_adapter(write_adapter(folder, factors("block.proj", 6, 5), **config))
        assert words in caught.value.message
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize("alpha", [None, [1], 10**400, -1e300, {"a\nb": []}])
    def test_values(self, folder, alpha):
        with pytest.raises(CheckpointError, match=r"adapter_config\.json: ") as caught:
            open_adapter(write_adapter(folder, factors("block.proj", 6, 5), lora_alpha=alpha))
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

    def test_no_weights(self, folder):
        with pytest.raises(CheckpointError, match="has no lora_A and lora_B"):
            open_adapter(write_adapter(folder, {}))
