"""Frames and pixels to latents: what fits, what does not, and what comes back."""

import pytest

from opensora_cli.core.conditions import LatentGrid
from opensora_cli.core.exceptions import RequestError

CAUSAL = LatentGrid(latent_channels=16, time_compression_ratio=4, spatial_compression_ratio=8, is_causal=True)
DC_AE = LatentGrid(latent_channels=128, time_compression_ratio=4, spatial_compression_ratio=32, is_causal=False)
FLAT = LatentGrid(latent_channels=16, time_compression_ratio=1, spatial_compression_ratio=8, is_causal=False)


@pytest.mark.parametrize(
    ("grid", "frames", "latent_frames", "back"),
    [
        (CAUSAL, 1, 1, 1),
        (CAUSAL, 5, 2, 5),
        (CAUSAL, 129, 33, 129),
        (DC_AE, 1, 1, 1),
        (DC_AE, 4, 1, 1),  # one latent frame is decoded as a picture
        (DC_AE, 8, 2, 8),
        (DC_AE, 128, 32, 128),
        (FLAT, 1, 1, 1),
        (FLAT, 7, 7, 7),
    ],
)
def test_frames_become_latent_frames(grid, frames, latent_frames, back):
    assert grid.latent_frames(frames) == latent_frames
    assert grid.num_frames(latent_frames) == back


@pytest.mark.parametrize(
    ("grid", "frames", "message"),
    [
        (CAUSAL, 130, "num_frames=130 must be 1 more than a multiple of 4: use 129 or 133"),
        (CAUSAL, 2, "num_frames=2 must be 1 more than a multiple of 4: use 1 or 5"),
        (CAUSAL, 0, "num_frames=0 must be at least 1"),
        (DC_AE, 130, "num_frames=130 must be 1, or a multiple of 4: use 128 or 132"),
        (DC_AE, 3, "num_frames=3 must be 1, or a multiple of 4: use 1 or 4"),
    ],
)
def test_other_numbers_are_refused(grid, frames, message):
    with pytest.raises(RequestError, match=f"^{message}$"):
        grid.latent_frames(frames)


@pytest.mark.parametrize("grid", [CAUSAL, DC_AE, FLAT])
def test_the_longest_clip_is_the_longest_that_comes_back(grid):
    def comes_back(frames: int) -> bool:
        try:
            return grid.num_frames(grid.latent_frames(frames)) == frames
        except RequestError:
            return False

    for frames in range(1, 40):
        assert grid.longest_clip(frames) == max(shorter for shorter in range(1, frames + 1) if comes_back(shorter))


def test_sides_are_divided_or_refused():
    assert CAUSAL.latent_size(256, 448) == (32, 56)
    for height, width in ((257, 448), (256, 449), (0, 448)):
        with pytest.raises(RequestError, match=f"height={height} and width={width} must be multiples of 8"):
            CAUSAL.latent_size(height, width)
