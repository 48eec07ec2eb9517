"""What is done to an autoencoder's weights besides learning: it must not show in what it makes of pictures."""

import numpy as np
import pytest
import torch
from closeness import assert_close
from tiny_autoencoders import VAES

from opensora_cli.data.scenes import render_scene, sample_scene
from opensora_cli.engine.components.configs import vae_config
from opensora_cli.engine.train.objectives.vae import move_to_last_tap, to_pixels, whiten_latents
from opensora_cli.models.vae.hunyuan import HunyuanVAE


@pytest.fixture
def vae():
    torch.manual_seed(0)
    vae = HunyuanVAE(vae_config(VAES["hunyuan"])).eval().requires_grad_(False)
    for weight in vae.parameters():
        weight.add_(0.05 * torch.randn(weight.shape))  # no bias is zero and no norm is the identity
    return vae


def clips(count, *, num_frames=5):
    rng = np.random.default_rng(1)
    frames = [render_scene(sample_scene(rng), size=32, num_frames=num_frames) for _ in range(count)]
    return to_pixels(torch.from_numpy(np.stack(frames)))


def test_pixels():
    frames = torch.zeros(1, 2, 4, 3, 3, dtype=torch.uint8)
    frames[0, 1, 2, 0] = torch.tensor([255, 51, 0])
    pixels = to_pixels(frames)
    assert pixels.shape == (1, 3, 2, 4, 3)
    assert_close(pixels[0, :, 1, 2, 0], torch.tensor([1.0, -0.6, -1.0]))
    assert pixels.is_contiguous(memory_format=torch.channels_last_3d)


class TestMoveToLastTap:
    def test_pictures_stay_what_they_were(self, vae):
        pictures = clips(3, num_frames=1)
        moments, decoded = vae.encode_moments(pictures), vae.decode(vae.encode(pictures))
        move_to_last_tap(dict(vae.named_parameters()))
        for before, after in zip(moments, vae.encode_moments(pictures), strict=True):
            assert_close(before, after)
        assert_close(decoded, vae.decode(vae.encode(pictures)))

    def test_the_past_is_not_seen_any_more(self, vae):
        taps = [
            layer.weight[:, :, :-1]
            for layer in vae.modules()
            if isinstance(layer, torch.nn.Conv3d) and layer.kernel_size[0] > 1
        ]
        assert len(taps) > 8
        assert all(tap.any() for tap in taps)
        move_to_last_tap(dict(vae.named_parameters()))
        assert not any(tap.any() for tap in taps)

    def test_a_second_time_changes_nothing(self, vae):
        move_to_last_tap(dict(vae.named_parameters()))
        once = {name: weight.clone() for name, weight in vae.state_dict().items()}
        move_to_last_tap(dict(vae.named_parameters()))
        assert all(torch.equal(weight, once[name]) for name, weight in vae.state_dict().items())


class TestWhitenLatents:
    def test_moments_are_normal_and_pixels_unchanged(self, vae):
        pixels = clips(6)
        decoded = vae.decode(vae.encode(pixels))
        before, _ = vae.encode_moments(pixels)
        assert before.std(dim=(0, 2, 3, 4)).sub(1.0).abs().min() > 0.1
        whiten_latents(vae, pixels)
        after, _ = vae.encode_moments(pixels)
        assert after.mean(dim=(0, 2, 3, 4)).abs().max() < 1e-4
        assert after.std(dim=(0, 2, 3, 4)).sub(1.0).abs().max() < 1e-4
        assert_close(vae.decode(vae.encode(pixels)), decoded, tolerance=1e-4)

    def test_the_posterior_is_the_same_but_for_its_scale(self, vae):
        pixels = clips(6)
        means, logvars = vae.encode_moments(pixels)
        whiten_latents(vae, pixels)
        scaled_means, scaled_logvars = vae.encode_moments(pixels)
        scale = means.std(dim=(0, 2, 3, 4), keepdim=True)
        assert_close(scaled_means * scale, means - means.mean(dim=(0, 2, 3, 4), keepdim=True), tolerance=1e-4)
        assert_close(torch.exp(0.5 * scaled_logvars) * scale, torch.exp(0.5 * logvars), tolerance=1e-4)
