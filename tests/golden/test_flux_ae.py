"""The 2D autoencoder against numbers of the reference."""

import pytest
import torch

from opensora_cli.models.vae.flux_ae import FluxAE, FluxAEConfig

# Of the recording: the size of its pictures, and whether they have a time axis.
NOT_OURS = ("resolution", "input")


@pytest.fixture
def recorded(golden):
    return golden("flux_ae")


@pytest.fixture
def vae(recorded):
    sizes = {name: value for name, value in recorded.config.items() if name not in NOT_OURS}
    vae = FluxAE(FluxAEConfig(**sizes))
    vae.load_state_dict(recorded.params, strict=True)
    return vae.eval().requires_grad_(False)


def as_clip(tensor):
    return tensor if tensor.dim() == 5 else tensor.unsqueeze(2)


def test_encode_mean(vae, recorded, assert_close):
    latents = vae.encode(as_clip(recorded.inputs["pixels"]))
    assert_close(latents, as_clip(recorded.outputs["encode_mean"]), what="encode_mean")


def test_decode(vae, recorded, assert_close):
    pixels = vae.decode(as_clip(recorded.inputs["latents"]))
    assert_close(pixels, as_clip(recorded.outputs["decode"]), what="decode")


def test_keys_and_shapes_of_the_released_checkpoint(golden_json):
    with torch.device("meta"):
        vae = FluxAE(FluxAEConfig())
    shapes = {key: list(tensor.shape) for key, tensor in vae.state_dict().items()}
    assert shapes == golden_json("checkpoint_keys")["flux1-dev-ae.safetensors"]
