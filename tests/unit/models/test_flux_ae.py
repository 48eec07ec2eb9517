"""The 2D autoencoder: frames as a batch, tiles, its training, its refusals."""

import pytest
import torch
from closeness import assert_close

from opensora_cli.models.vae.config import FluxAEConfig, Tiling
from opensora_cli.models.vae.flux_ae import FluxAE

SMALL = {"ch": 32, "ch_mult": (1, 2, 1), "num_res_blocks": 1, "z_channels": 4, "tile_size": 16}


@pytest.fixture
def vae():
    torch.manual_seed(0)
    return FluxAE(FluxAEConfig(**SMALL)).requires_grad_(False)


def random_clip(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_every_frame_is_encoded_and_decoded_by_itself(vae):
    pixels = random_clip(2, 3, 3, 8, 12)
    latents = vae.encode(pixels)
    assert latents.shape == (2, 4, 3, 2, 3)
    decoded = vae.decode(latents)
    assert decoded.shape == pixels.shape
    for index in range(3):
        frame = slice(index, index + 1)
        assert_close(latents[:, :, frame], vae.encode(pixels[:, :, frame]))
        assert_close(decoded[:, :, frame], vae.decode(latents[:, :, frame]))


def test_temporal_tiling_changes_nothing_and_gives_frames_one_by_one(vae):
    tiling = Tiling(temporal=True)
    pixels = random_clip(1, 3, 3, 8, 8)
    latents = vae.encode(pixels)
    assert_close(vae.encode(pixels, tiling=tiling), latents)
    pieces = list(vae.decode_pieces(latents, tiling=tiling))
    assert [piece.shape[2] for piece in pieces] == [1, 1, 1]
    assert_close(torch.cat(pieces, dim=2), vae.decode(latents))
