"""The table of condition modes, and the grid of latents: frames and pixels that fit."""

import pytest

from opensora_cli.core.conditions import (
    LatentGrid,
    ReferencePart,
    condition_mode,
    reference_parts,
    suggested_mode,
)
from opensora_cli.core.exceptions import RequestError

CAUSAL = LatentGrid(latent_channels=16, time_compression_ratio=4, spatial_compression_ratio=8, is_causal=True)
DC_AE = LatentGrid(latent_channels=128, time_compression_ratio=4, spatial_compression_ratio=32, is_causal=False)
FLAT = LatentGrid(latent_channels=16, time_compression_ratio=1, spatial_compression_ratio=8, is_causal=False)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("t2v", []),
        ("i2v_head", [(0, False, 1)]),
        ("i2v_tail", [(-1, True, 1)]),
        ("i2v_loop", [(0, False, 1), (-1, True, 1)]),
        ("v2v_head", [(0, False, 33)]),
        ("v2v_tail", [(0, True, 33)]),
        ("v2v_head_easy", [(0, False, 65)]),
        ("v2v_tail_easy", [(0, True, 65)]),
    ],
)
def test_what_is_read_for_each_mode(name, parts):
    assert reference_parts(condition_mode(name)) == tuple(ReferencePart(*part) for part in parts)


def test_frames_of_an_autoencoder_that_is_not_causal():
    assert reference_parts(condition_mode("v2v_head"), causal=False)[0].num_frames == 32
    assert reference_parts(condition_mode("v2v_tail_easy"), causal=False)[0].num_frames == 64
    assert reference_parts(condition_mode("i2v_head"), causal=False)[0].num_frames == 1


def test_unknown_mode_names_the_nearest():
    with pytest.raises(RequestError, match=r"condition\.mode='i2v_haed' is not one of t2v, i2v_head") as error:
        condition_mode("i2v_haed")
    assert error.value.hint == "did you mean i2v_head?"


@pytest.mark.parametrize(
    ("are_pictures", "name"),
    [([], "t2v"), ([True], "i2v_head"), ([True, True], "i2v_loop"), ([False], "v2v_head"), ([True, False], None)],
)
def test_the_mode_that_files_suggest(are_pictures, name):
    found = suggested_mode(are_pictures)
    assert (None if found is None else found.name) == name


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
