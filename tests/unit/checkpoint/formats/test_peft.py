"""The files of adapters: what cannot be merged, what is broken, and what is hostile."""

import os

import pytest
from tiny_adapters import factors, write_adapter

from opensora_cli.checkpoint.lora import open_adapter
from opensora_cli.core.exceptions import CheckpointError, RequestError


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
            ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16' has changed the weights"),
        ],
    )
    def test_features_that_cannot_be_added(self, folder, config, words):
        with pytest.raises(RequestError) as caught:
            open_adapter(write_adapter(folder, factors("block.proj", 6, 5), **config))
        assert words in caught.value.message
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize(
        "config",
        [
            *({"lora_alpha": value} for value in (None, [1], 10**400, -1e300, {"a\nb": []})),
            *({"alpha_pattern": {name: 2}} for name in ("(a+)+b", "[z-a]", r"\w+")),
            {"alpha_pattern": {"proj": "much"}},
            {"alpha_pattern": [1]},
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

    def test_no_weights(self, folder):
        with pytest.raises(CheckpointError, match="has no lora_A and lora_B"):
            open_adapter(write_adapter(folder, {}))
