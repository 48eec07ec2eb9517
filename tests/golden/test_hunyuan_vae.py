"""The causal VAE against numbers of the reference: un-tiled, and with the reference's tiles."""

import pytest
import torch

from opensora_cli.models.vae.hunyuan import HunyuanVAE, HunyuanVAEConfig
from opensora_cli.models.vae.tiling import Tiling

TILINGS = {
    "": Tiling(),
    "_spatial": Tiling(spatial=True),
    "_temporal": Tiling(temporal=True),
    "_both": Tiling(spatial=True, temporal=True),
}


@pytest.fixture
def recorded(golden):
    return golden("hunyuan_vae")


@pytest.fixture
def vae(recorded):
    vae = HunyuanVAE(HunyuanVAEConfig(**recorded.config))
    vae.load_state_dict(recorded.params, strict=True)
    return vae.eval().requires_grad_(False)


@pytest.mark.parametrize("suffix", TILINGS)
def test_encode_mode(vae, recorded, assert_close, suffix):
    latents = vae.encode(recorded.inputs[f"pixels{suffix}"], tiling=TILINGS[suffix])
    assert_close(latents, recorded.outputs[f"encode_mode{suffix}"], what=f"encode_mode{suffix}")


@pytest.mark.parametrize("suffix", TILINGS)
def test_decode(vae, recorded, assert_close, suffix):
    pixels = vae.decode(recorded.inputs[f"latents{suffix}"], tiling=TILINGS[suffix])
    assert_close(pixels, recorded.outputs[f"decode{suffix}"], what=f"decode{suffix}")


def test_keys_and_shapes_of_the_released_checkpoint(golden_json):
    with torch.device("meta"):
        vae = HunyuanVAE(HunyuanVAEConfig())
    shapes = {key: list(tensor.shape) for key, tensor in vae.state_dict().items()}
    assert shapes == golden_json("checkpoint_keys")["hunyuan_vae.safetensors"]
