"""The benchmark of the autoencoder: the plain way computes the same, in more memory."""

import pytest
import torch
from closeness import assert_close
from plain_vae import plain_decode, plain_encode
from small_hunyuan import SMALL_HUNYUAN

from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.models.vae.tiles import NO_TILING, Tiling


@pytest.mark.parametrize("tiling", [NO_TILING, Tiling(spatial=True)])
def test_the_plain_autoencoder_is_ours(tiling: Tiling) -> None:
    torch.manual_seed(0)
    vae = HunyuanVAE(SMALL_HUNYUAN).double().requires_grad_(False)
    pixels = torch.rand(1, 3, 5, 20, 12, dtype=torch.float64) * 2 - 1
    with torch.inference_mode():
        latents = vae.encode(pixels, tiling=tiling)
        assert_close(latents, plain_encode(vae, pixels, tiling=tiling), tolerance=1e-10)
        assert_close(vae.decode(latents, tiling=tiling), plain_decode(vae, latents, tiling=tiling), tolerance=1e-10)
