"""The autoencoders against numbers of the reference: un-tiled, and with the reference's tiles."""

import pytest
import torch

from opensora_cli.models.vae.config import DCAEConfig, FluxAEConfig, HunyuanVAEConfig, Tiling
from opensora_cli.models.vae.dc_ae import DCAE
from opensora_cli.models.vae.flux_ae import FluxAE
from opensora_cli.models.vae.hunyuan import HunyuanVAE

MODELS = {"hunyuan_vae": HunyuanVAE, "dc_ae": DCAE, "flux_ae": FluxAE}
CONFIGS = {"hunyuan_vae": HunyuanVAEConfig, "dc_ae": DCAEConfig, "flux_ae": FluxAEConfig}
ENCODED = {"hunyuan_vae": "encode_mode", "dc_ae": "encode", "flux_ae": "encode_mean"}
RELEASED = {
    "hunyuan_vae": "hunyuan_vae.safetensors",
    "dc_ae": "F32T4C128_AE.safetensors",
    "flux_ae": "flux1-dev-ae.safetensors",
}
TILINGS = {
    "": Tiling(),
    "_spatial": Tiling(spatial=True),
    "_temporal": Tiling(temporal=True),
    "_both": Tiling(spatial=True, temporal=True),
}
# The suffixes of the recorded inputs and outputs, which name the tiling.
CASES = [
    *(("hunyuan_vae", suffix) for suffix in TILINGS),
    *(("dc_ae", suffix) for suffix in ("", "_spatial")),
    pytest.param("dc_ae", "_temporal", marks=pytest.mark.slow),
    ("flux_ae", ""),
]
# Sizes of the recording: of pictures, their colors, and whether they have a time axis.
NOT_OURS = {"resolution", "input", "in_channels", "out_channels", "out_ch"}


def load(file, name):
    sizes = {key: value for key, value in file.config.items() if key not in NOT_OURS}
    vae = MODELS[name](CONFIGS[name](**sizes))
    vae.load_state_dict(file.params, strict=True)
    return vae.eval().requires_grad_(False)


def as_clip(tensor):
    return tensor if tensor.dim() == 5 else tensor.unsqueeze(2)


@pytest.mark.parametrize(("name", "suffix"), CASES)
def test_clips_and_latents_are_those_of_the_reference(golden, assert_close, name, suffix):
    file = golden(name)
    vae, tiling = load(file, name), TILINGS[suffix]
    latents = vae.encode(as_clip(file.inputs[f"pixels{suffix}"]), tiling=tiling)
    assert_close(latents, as_clip(file.outputs[f"{ENCODED[name]}{suffix}"]), what="encode")
    pixels = vae.decode(as_clip(file.inputs[f"latents{suffix}"]), tiling=tiling)
    assert_close(pixels, as_clip(file.outputs[f"decode{suffix}"]), what="decode")


def test_encoding_of_a_picture_is_that_of_the_reference(golden, assert_close):
    file = golden("dc_ae")
    assert_close(load(file, "dc_ae").encode(file.inputs["pixels_image"]), file.outputs["encode_image"])


@pytest.mark.parametrize("name", MODELS)
def test_keys_and_shapes_of_the_released_checkpoint(golden_json, name):
    with torch.device("meta"):
        vae = MODELS[name](CONFIGS[name]())
    shapes = {key: list(tensor.shape) for key, tensor in vae.state_dict().items()}
    assert shapes == golden_json("checkpoint_keys")[RELEASED[name]]
