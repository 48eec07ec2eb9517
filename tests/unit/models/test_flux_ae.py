"""The 2D autoencoder: frames as a batch, tiles, its training, its refusals."""

import pytest
import torch
from closeness import assert_close
from torch.nn import functional

from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.vae.flux_ae import Attention, Downsample, FluxAE, FluxAEConfig
from opensora_cli.models.vae.tiling import Tiling

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


def test_spatial_tiles_give_pictures_of_the_same_size(vae):
    tiling = Tiling(spatial=True)
    pixels = random_clip(1, 3, 2, 16, 28)
    latents = vae.encode(pixels, tiling=tiling)
    assert latents.shape == (1, 4, 2, 4, 7)
    assert vae.decode(latents, tiling=tiling).shape == pixels.shape
    assert_close(vae.encode(pixels[..., :16], tiling=tiling), vae.encode(pixels[..., :16]))
    # Nothing is blended where the second tile does not reach.
    assert_close(latents[..., :3], vae.encode(pixels[..., :16])[..., :3])


def test_latents_are_shifted_and_scaled(vae):
    mean, logvar = vae.encode_moments(random_clip(1, 3, 1, 8, 8))
    assert_close(vae.encode(random_clip(1, 3, 1, 8, 8)), 0.3611 * (mean - 0.1159))
    sample = vae.encode(random_clip(1, 3, 1, 8, 8), generator=torch.Generator().manual_seed(5))
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(5))
    assert_close(sample, 0.3611 * (mean + torch.exp(logvar / 2) * noise - 0.1159))


def test_attention_is_dense_attention_over_positions():
    torch.manual_seed(0)
    layer = Attention(32).requires_grad_(False)
    hidden = random_clip(2, 32, 3, 4)
    normed = layer.norm(hidden)
    q, k, v = (project(normed).flatten(2) for project in (layer.q, layer.k, layer.v))
    weights = torch.softmax(q.transpose(1, 2) @ k / 32**0.5, dim=-1)
    expected = hidden + layer.proj_out((v @ weights.transpose(1, 2)).view(hidden.shape))
    assert_close(layer(hidden), expected)


def test_downsampling_pads_below_and_on_the_right():
    layer = Downsample(1).requires_grad_(False)
    layer.conv.weight.fill_(0)
    layer.conv.weight[0, 0, 2, 2] = 1
    layer.conv.bias.fill_(0)
    hidden = torch.arange(1.0, 17.0).view(1, 1, 4, 4)
    assert layer(hidden)[0, 0].tolist() == [[11, 0], [0, 0]]


@pytest.mark.parametrize("autocast", [False, True])
def test_every_weight_learns(autocast):
    torch.manual_seed(0)
    vae = FluxAE(FluxAEConfig(**SMALL))
    pixels = random_clip(1, 3, 2, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        result = vae(pixels, generator=torch.Generator().manual_seed(0))
    functional.mse_loss(result.pixels_BCTHW.float(), pixels).backward()
    for name, parameter in vae.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert vae.last_layer.weight is vae.decoder.conv_out.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ch": 40}, "vae.flux_ae.ch=40 must be a multiple of 32"),
        ({"ch_mult": ()}, "vae.flux_ae.ch_mult"),
        ({"num_res_blocks": 0}, "must be at least 1"),
        ({"tile_size": 18}, "vae.flux_ae.tile_size=18"),
        ({"tile_overlap_factor": 1.0}, "vae.flux_ae.tile_overlap_factor=1.0"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(change, message):
    with pytest.raises(RequestError, match=message):
        FluxAEConfig(**{**SMALL, **change})


def test_pixels_and_latents_of_a_wrong_shape_are_refused(vae):
    with pytest.raises(RequestError, match="height=8 and width=6 must be multiples of 4"):
        vae.encode(torch.zeros(1, 3, 2, 8, 6))
    with pytest.raises(RequestError, match="cannot be decoded"):
        vae.decode(torch.zeros(1, 3, 2, 2, 2))
