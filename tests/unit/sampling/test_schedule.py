"""Noise and timesteps."""

import pytest
import torch

from opensora_cli.sampling.schedule import (
    flow_shift_for,
    latent_size,
    noise_latents,
)


def test_automatic_shift():
    assert flow_shift_for(tokens_per_frame=256, num_latent_frames=1) == 1.0
    assert flow_shift_for(tokens_per_frame=4096, num_latent_frames=1) == 3.0
    assert flow_shift_for(tokens_per_frame=2176, num_latent_frames=9) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("size", "latent"), [((192, 336), (24, 42)), ((193, 336), (26, 42)), ((1, 1), (2, 2)), ((360, 640), (46, 80))]
)
def test_latent_size_covers_every_pixel(size, latent):
    assert latent_size(*size) == latent


def _noise(seeds, **changes):
    options = {"num_latent_frames": 3, "height": 32, "width": 48, "device": "cpu", "dtype": torch.float32} | changes
    return noise_latents(seeds, **options)


def test_noise_is_one_seeded_randn():
    expected = torch.randn(1, 16, 3, 4, 6, generator=torch.Generator().manual_seed(42))
    assert torch.equal(_noise([42]), expected)
