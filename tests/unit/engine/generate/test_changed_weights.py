"""Weights that are cut short during a run: a CheckpointError names them, and no signal ends the process."""

import os
import shutil
from dataclasses import replace

import pytest
from tiny_world import demo_settings

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.components.weights import Component, find_weights
from opensora_cli.engine.generate import decode, denoise, models, text
from opensora_cli.engine.generate.run import generate

pytestmark = pytest.mark.usefixtures("without_estimates")


@pytest.fixture
def settings(world, tmp_path):
    """Return settings of weights that may be spoiled."""
    own = tmp_path / "demo"
    shutil.copytree(world.demo, own)
    return demo_settings(replace(world, demo=own), tmp_path, video__num_frames="1")


def in_dtype_of(settings, component):
    """Return settings under which a component is computed with where it is mapped."""
    return settings.replace({"runtime.dtype": "bfloat16" if component is Component.TRANSFORMER else "float32"})


def file_of(settings, component):
    path = find_weights(settings).path(component)
    return path / "model.safetensors" if component in (Component.T5, Component.CLIP) else path


STAGES = [
    (Component.T5, models, "load_t5", text, "encode_texts"),
    (Component.TRANSFORMER, models, "load_transformer", denoise, "sample_latents"),
    (Component.VAE, models, "load_autoencoder", decode, "decode_latents"),
]


@pytest.mark.parametrize(("component", "loads", "loader", "uses", "user"), STAGES)
@pytest.mark.parametrize("when", ["between plan and load", "between load and use"])
def test_a_file_that_is_cut_short_is_named(settings, monkeypatch, when, component, loads, loader, uses, user):
    module, name = (loads, loader) if when == "between plan and load" else (uses, user)
    function, cut = getattr(module, name), []

    def cutting(first, *args, **options):
        if not cut:
            cut.append(file_of(settings, component))
            os.truncate(cut[0], cut[0].stat().st_size // 2)
        return function(first, *args, **options)

    monkeypatch.setattr(module, name, cutting)
    with pytest.raises(CheckpointError) as caught:
        generate(in_dtype_of(settings, component))
    assert cut[0].name in str(caught.value.message) or str(cut[0].parent) in caught.value.message
    if when == "between load and use":
        assert caught.value.message == f"{cut[0]} was changed while it was in use"
