"""The benchmark of the autoencoder: the plain way computes the same, in more memory."""

import pytest
import speed_vae
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


@pytest.mark.slow
def test_rows_have_error_and_memory() -> None:
    torch.manual_seed(0)
    vae = HunyuanVAE(SMALL_HUNYUAN).requires_grad_(False)
    rows = list(speed_vae._both(vae, vae, torch.rand(1, 3, 17, 64, 64), NO_TILING, pairs=1, title="small"))
    assert [row.name for row in rows] == ["encode small", "decode small"]
    for row in rows:
        assert 0 < row.figures["memory"] == row.figures["bytes"] / row.figures["plain_bytes"] <= speed_vae.MOST_MEMORY
        assert 0 < row.figures["error"] < 1e-4
