"""Finding weights without a network, and choosing the model that they allow."""

import shlex
import shutil
import socket

import pytest
import torch
from tiny_world import dc_ae_settings, demo_settings, released_settings

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.components import weights
from opensora_cli.engine.components.weights import Component, choose_model, find_weights
from opensora_cli.models.registry import AUTO, DEMO, OPEN_SORA_V2


@pytest.fixture(autouse=True)
def empty_machine(tmp_path, monkeypatch):
    """Provide a machine without ckpts, network and CUDA, and with an empty Hugging Face cache."""

    def refuse(*_):
        raise AssertionError("a request was made")

    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def put_into_hub(repo, source, tmp_path):
    folder = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
    shutil.copytree(source, folder / "snapshots" / "abc123")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc123")
    return folder / "snapshots" / "abc123"


def without_folder(world, tmp_path):
    return released_settings(world, tmp_path, runtime__weights=None)


def test_the_working_directory_is_searched_without_a_named_folder(world, tmp_path):
    found = find_weights(released_settings(world, tmp_path))
    assert found.complete
    assert found.path(Component.T5) == world.released / "google/t5-v1_1-xxl"
    shutil.copytree(world.released, "ckpts")
    assert find_weights(without_folder(world, tmp_path)).complete
    assert not find_weights(released_settings(world, tmp_path, runtime__weights=str(tmp_path / "elsewhere"))).paths


def test_components_from_several_places(world, tmp_path):
    shutil.copytree(world.released, "ckpts", ignore=shutil.ignore_patterns("google", "hunyuan*"))
    put_into_hub("hpcai-tech/Open-Sora-v2", world.released, tmp_path)
    shutil.rmtree(tmp_path / "hub/models--hpcai-tech--Open-Sora-v2/snapshots/abc123/google")
    own = put_into_hub("google/t5-v1_1-xxl", world.released / "google/t5-v1_1-xxl", tmp_path)
    found = find_weights(without_folder(world, tmp_path))
    assert found.complete
    assert found.path(Component.TRANSFORMER).parent.name == "ckpts"
    assert found.path(Component.VAE).parent.name == "abc123"
    assert found.path(Component.T5) == own


def test_everything_missing_is_named_at_once(world, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        find_weights(without_folder(world, tmp_path)).require()
    message = caught.value.message
    for name in ("Open_Sora_v2.safetensors", "hunyuan_vae.safetensors", "google/t5-v1_1-xxl", "openai/clip-vit"):
        assert name in message
    assert "ckpts" in message
    assert "Hugging Face cache" in message
    assert caught.value.hint == "osora ckpt download open-sora-v2"


def test_half_a_download_names_the_rest(world, tmp_path):
    folder = tmp_path / "my weights"
    shutil.copytree(world.released, folder)
    (folder / "google/t5-v1_1-xxl/tokenizer.json").unlink()
    (folder / "hunyuan_vae.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        find_weights(released_settings(world, tmp_path, runtime__weights=str(folder))).require()
    assert "Open_Sora_v2" not in caught.value.message
    assert "hunyuan_vae.safetensors, google/t5-v1_1-xxl/spiece.model or tokenizer.json" in caught.value.message
    assert caught.value.hint == f"osora ckpt download open-sora-v2 --to {shlex.quote(str(folder))}"


def test_text_encoders_of_one_released_model_serve_the_other(world, tmp_path):
    put_into_hub("hpcai-tech/Open-Sora-v2", world.released, tmp_path)
    settings = dc_ae_settings(world, tmp_path, runtime__weights=None)
    found = find_weights(settings)
    assert set(found.missing) == {Component.TRANSFORMER, Component.VAE}
    with pytest.raises(CheckpointError, match=r"of the open-sora-v2-dc-ae model are missing: Open_Sora_v2_V") as caught:
        found.require()
    assert caught.value.hint == "osora ckpt download open-sora-v2-dc-ae"
    put_into_hub("hpcai-tech/Open-Sora-v2-Video-DC-AE", world.dc_ae, tmp_path)
    assert find_weights(settings).complete


def test_demo_is_in_the_package(world, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "packaged_demo", lambda: world.demo)
    # OSORA_WEIGHTS is usually set for the released model.
    for folder in (None, str(world.released)):
        found = find_weights(demo_settings(world, tmp_path, runtime__weights=folder))
        assert found.path(Component.TRANSFORMER) == world.demo / "transformer.safetensors"


@pytest.mark.parametrize(
    ("has_weights", "has_cuda", "device", "reason"),
    [
        (False, False, "auto", "the weights of open-sora-v2 are missing and there is no CUDA device"),
        (True, False, "auto", "there is no CUDA device"),
        (True, True, "cpu", "the CPU was asked for"),
        (True, True, "auto", None),
    ],
)
def test_auto_needs_weights_and_cuda(world, monkeypatch, has_weights, has_cuda, device, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    weights_folder = str(world.released) if has_weights else None
    name, found = choose_model(
        AUTO, weights=weights_folder, device=device, loading=lambda: pytest.fail("torch is imported already")
    )
    assert name == (OPEN_SORA_V2 if reason is None else DEMO)
    assert found == reason or (reason is None and str(world.released) in found)


def test_auto_without_some_weights_names_them(world, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shutil.copytree(world.released, tmp_path / "w", ignore=shutil.ignore_patterns("openai"))
    reason = f"weights (clip) of open-sora-v2 are missing in {tmp_path / 'w'}"
    assert choose_model(AUTO, weights=str(tmp_path / "w")) == (DEMO, reason)
