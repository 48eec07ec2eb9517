"""`load_checkpoint`: any format, from here or from the Hub, into a model that has weights or has none."""

import pytest
import torch
from fake_hub import FakeRepo, connect, serving
from huggingface_hub import constants
from safetensors.torch import save_file
from tiny_weights import bit_equal
from torch import nn

from opensora_cli.community.checkpoint import load_checkpoint
from opensora_cli.core.exceptions import CheckpointError, RequestError


def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))


@pytest.fixture
def weights():
    return model(0).state_dict()


def equal(loaded, weights):
    return bit_equal(loaded.state_dict(), weights)


def test_weights_are_overwritten_where_they_are(tmp_path, weights):
    save_file(weights, tmp_path / "a")
    loaded = model(1).to(torch.bfloat16)
    held = loaded[0].weight
    assert load_checkpoint(loaded, tmp_path / "a") is loaded
    assert held is loaded[0].weight
    assert torch.equal(held, weights["0.weight"].bfloat16())
    with torch.no_grad():
        held.zero_()
    assert equal(load_checkpoint(model(1), tmp_path / "a"), weights)  # the file is as it was


def test_a_training_is_loaded_from_the_model_subfolder_or_another(tmp_path, weights):
    for name, factor in (("model", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        save_file({key: factor * tensor for key, tensor in weights.items()}, tmp_path / name / "a.safetensors")
    with pytest.raises(CheckpointError, match="not written to its end"):
        load_checkpoint(model(1), tmp_path)
    (tmp_path / "running_states.json").write_text("{}")
    assert equal(load_checkpoint(model(1), tmp_path), weights)
    doubled = {key: 2 * tensor for key, tensor in weights.items()}
    assert equal(load_checkpoint(model(1), tmp_path, cai_model_name="other"), doubled)


def test_names_are_changed_first(tmp_path, weights):
    save_file({f"old.{key}": tensor for key, tensor in weights.items()}, tmp_path / "a")
    with pytest.raises(CheckpointError, match="3 missing"):
        load_checkpoint(model(1), tmp_path / "a")
    assert equal(load_checkpoint(model(1), tmp_path / "a", rename_keys={"old.": ""}), weights)
    with pytest.raises(RequestError, match=r"two tensors the same name: \.weight"):
        load_checkpoint(model(1), tmp_path / "a", rename_keys={"old.0": "", "old.1": ""})


class TestMismatches:
    @pytest.fixture
    def partial(self, tmp_path, weights):
        save_file({"0.weight": weights["0.weight"], "more": torch.ones(1)}, tmp_path / "a")
        return tmp_path / "a"

    def test_loading_without_strict_warns(self, partial, weights):
        with pytest.warns(UserWarning, match="2 missing"):
            loaded = load_checkpoint(model(1), partial, strict=False)
        assert torch.equal(loaded[0].weight, weights["0.weight"])
        assert torch.equal(loaded[1].weight, model(1)[1].weight)


class TestHub:
    @pytest.fixture
    def hub(self, tmp_path, weights, monkeypatch):
        save_file(weights, tmp_path / "a")
        with serving() as server:
            files = {"one/a.safetensors": (tmp_path / "a").read_bytes(), "README.md": b"no weights"}
            server.repos["owner/repo"] = FakeRepo(files)
            connect(server, monkeypatch)
            yield server

    def test_a_file_is_fetched(self, tmp_path, weights, hub, monkeypatch):
        name = "owner/repo/one/a.safetensors"
        assert equal(load_checkpoint(model(1), name, cache_dir=tmp_path / "cache"), weights)
        assert [file for file, _ in hub.transfers] == [file for file in hub.repos["owner/repo"].files if "a.s" in file]
        # Without a connection, what was fetched before is enough.
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert equal(load_checkpoint(model(2), name, cache_dir=tmp_path / "cache"), weights)
        assert len(hub.transfers) == 1

    @pytest.mark.parametrize(
        "name",
        ["owner/repo", "owner/none/a", "owner/repo/none.safetensors", "./nowhere", "nowhere", "a b/c d"],
    )
    def test_missing_repositories_are_refused(self, tmp_path, hub, name):
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(model(1), name, cache_dir=tmp_path / "cache")
        assert f"{name} does not exist" in caught.value.message
        assert "\n" not in caught.value.message
