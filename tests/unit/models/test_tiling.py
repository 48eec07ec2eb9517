"""Tiles: where they are cut, and that they are joined and blended at the same places."""

import pytest
import torch
from closeness import assert_close
from small_autoencoders import SMALL_DC_AE

from opensora_cli.models.vae.autoencoder import blend, run_tiled
from opensora_cli.models.vae.config import DCAEConfig, HunyuanVAEConfig, Tiling

SPACE, TIME, BOTH = Tiling(spatial=True), Tiling(temporal=True), Tiling(spatial=True, temporal=True)

# Tiles of 4 x 4 latents and 4 latent frames, of a causal model one more; a latent stands for 4 x 4 x 4 pixels.
CAUSAL = HunyuanVAEConfig(sample_size=16, sample_tsize=16, spatial_compression_ratio=4)
NOT_CAUSAL = SMALL_DC_AE


def random_clip(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


def down(pixels):
    """An encoder that looks at one pixel for each latent: tiling it must change nothing."""
    return pixels[:, :, ::4, ::4, ::4]


def up(latents):
    """A causal decoder that repeats latents."""
    wide = latents.repeat_interleave(4, dim=3).repeat_interleave(4, dim=4)
    return torch.cat((wide[:, :, :1], wide[:, :, 1:].repeat_interleave(4, dim=2)), dim=2)


def up_all_frames(latents):
    """A decoder that repeats latents, and takes a single latent frame for a picture."""
    wide = latents.repeat_interleave(4, dim=3).repeat_interleave(4, dim=4)
    return wide if latents.shape[2] == 1 else wide.repeat_interleave(4, dim=2)


@pytest.mark.parametrize(
    ("config", "decode", "tiling", "num_latent_frames", "height", "width"),
    [
        *((CAUSAL, up, TIME, frames, 2, 3) for frames in (1, 4, 5, 6, 7, 8, 12)),
        *((CAUSAL, up, SPACE, 2, height, width) for height, width in ((4, 4), (5, 4), (2, 7), (6, 11))),
        (CAUSAL, up, BOTH, 12, 6, 11),
        (CAUSAL, up, BOTH, 5, 4, 5),
        *((NOT_CAUSAL, up_all_frames, TIME, frames, 2, 3) for frames in range(2, 15)),
        (NOT_CAUSAL, up_all_frames, BOTH, 10, 6, 11),
        (NOT_CAUSAL, up_all_frames, BOTH, 7, 5, 4),
    ],
)
def test_tiles_of_local_functions_fit_together(config, decode, tiling, num_latent_frames, height, width):
    latents = random_clip(2, 3, num_latent_frames, height, width)
    pixels = decode(latents)
    of_pixels, of_latents = config.tile_grids()
    assert_close(run_tiled(decode, latents, grid=of_latents, tiling=tiling), pixels)
    assert_close(run_tiled(down, pixels, grid=of_pixels, tiling=tiling), latents)


def tile_shapes(*shape, tiling, config=CAUSAL):
    shapes = []

    def run(tile):
        shapes.append(tuple(tile.shape[2:]))
        return down(tile)

    grid = config.tile_grids()[0]
    run_tiled(run, torch.zeros(1, 1, *shape), grid=grid, tiling=tiling)
    assert grid.count(shape, tiling) == len(shapes)
    return shapes


@pytest.mark.parametrize(
    ("shape", "tiling"), [((5, 16, 16), BOTH), ((33, 16, 16), SPACE), ((5, 40, 40), TIME), ((33, 40, 40), Tiling())]
)
def test_a_clip_is_cut_only_along_the_chosen_axes_that_exceed_a_tile(shape, tiling):
    assert tile_shapes(*shape, tiling=tiling) == [shape]


@pytest.mark.parametrize("num_frames", [52, 124])
def test_no_frame_is_lost_where_the_last_tile_would_have_one_latent_frame(num_frames):
    lengths = []

    def decode(latents):
        lengths.append(latents.shape[2])
        return latents.repeat_interleave(4 if latents.shape[2] > 1 else 1, dim=2)

    latents = random_clip(1, 1, num_frames // 4, 1, 1)
    decoded = run_tiled(decode, latents, grid=DCAEConfig().tile_grids()[1], tiling=TIME)
    assert lengths == [8] * (len(lengths) - 1) + [7]
    assert_close(decoded, latents.repeat_interleave(4, dim=2))


@pytest.mark.parametrize("dim", [2, 3, 4])
def test_blend_fades_linearly_from_the_tile_before(dim):
    before, after = torch.full((1, 1, 6, 6, 6), 8.0), torch.zeros(1, 1, 6, 6, 6)
    line = blend(before, after, length=4, dim=dim).movedim(dim, -1)
    assert torch.equal(line, torch.tensor([8.0, 6.0, 4.0, 2.0, 0.0, 0.0]).expand_as(line))
