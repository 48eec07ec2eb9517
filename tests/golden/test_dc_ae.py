"""The video DC-AE against numbers of the reference: clips, pictures, and the reference's tiles."""

import pytest
import torch

from opensora_cli.models.vae.dc_ae import DCAE, DCAEConfig
from opensora_cli.models.vae.tiling import Tiling

TILINGS = {"": Tiling(), "_spatial": Tiling(spatial=True), "_temporal": Tiling(temporal=True)}


@pytest.fixture
def recorded(golden):
    return golden("dc_ae")


@pytest.fixture
def vae(recorded):
    vae = DCAE(DCAEConfig(**recorded.config))
    vae.load_state_dict(recorded.params, strict=True)
    return vae.eval().requires_grad_(False)


@pytest.mark.parametrize("suffix", TILINGS)
def test_encode(vae, recorded, assert_close, suffix):
    latents = vae.encode(recorded.inputs[f"pixels{suffix}"], tiling=TILINGS[suffix])
    assert_close(latents, recorded.outputs[f"encode{suffix}"], what=f"encode{suffix}")


def test_encode_of_a_picture(vae, recorded, assert_close):
    latents = vae.encode(recorded.inputs["pixels_image"])
    assert_close(latents, recorded.outputs["encode_image"], what="encode_image")


@pytest.mark.parametrize("suffix", TILINGS)
def test_decode(vae, recorded, assert_close, suffix):
    pixels = vae.decode(recorded.inputs[f"latents{suffix}"], tiling=TILINGS[suffix])
    assert_close(pixels, recorded.outputs[f"decode{suffix}"], what=f"decode{suffix}")


def test_keys_and_shapes_of_the_released_checkpoint(golden_json):
    with torch.device("meta"):
        vae = DCAE(DCAEConfig())
    shapes = {key: list(tensor.shape) for key, tensor in vae.state_dict().items()}
    assert shapes == golden_json("checkpoint_keys")["F32T4C128_AE.safetensors"]
