"""Exported autoencoders of the demo: prepared for clips, and whitened."""

from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import assert_close
from safetensors.torch import load_file, save_file
from tiny_autoencoders import VAES

from demo_world.autoencoder import finish_autoencoder, gather_taps, whiten_latents
from demo_world.scenes import render_scene, sample_scene
from demo_world.settings import DemoSettings
from opensora_cli.engine.components.architectures import new_autoencoder
from opensora_cli.engine.train.objectives.vae import to_pixels


@pytest.fixture
def vae():
    torch.manual_seed(0)
    vae = new_autoencoder(VAES["hunyuan"]).eval().requires_grad_(False)
    for weight in vae.parameters():
        weight.add_(0.05 * torch.randn(weight.shape))  # no bias is zero and no norm is the identity
    return vae


def clips(count, *, num_frames=5):
    rng = np.random.default_rng(1)
    frames = [render_scene(sample_scene(rng), size=32, num_frames=num_frames) for _ in range(count)]
    return to_pixels(torch.from_numpy(np.stack(frames)))


class TestGatherTaps:
    def test_pictures_stay_what_they_were(self, vae):
        pictures = clips(3, num_frames=1)
        moments, decoded = vae.encode_moments(pictures), vae.decode(vae.encode(pictures))
        gather_taps(dict(vae.named_parameters()))
        for before, after in zip(moments, vae.encode_moments(pictures), strict=True):
            assert_close(before, after)
        assert_close(decoded, vae.decode(vae.encode(pictures)))

    def test_of_the_past_only_its_differences_stay_and_a_second_time_changes_nothing(self, vae):
        before = {name: weight.clone() for name, weight in vae.named_parameters()}
        gather_taps(dict(vae.named_parameters()))
        once = {name: weight.clone() for name, weight in vae.named_parameters()}
        gather_taps(dict(vae.named_parameters()))
        kernels = 0
        for name, weight in vae.named_parameters():
            assert torch.equal(weight, once[name])
            if weight.ndim < 5 or weight.shape[2] == 1:
                assert torch.equal(weight, before[name])
                continue
            kernels += 1
            assert torch.equal(weight[:, :, 0], -weight[:, :, 1])
            assert_close(weight[:, :, 0] - weight[:, :, 1], before[name][:, :, 0] - before[name][:, :, 1])
            assert_close(weight[:, :, 2], before[name].sum(dim=2))
        assert kernels > 8


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


def test_an_export_is_finished(vae, tmp_path: Path) -> None:
    weights, path = vae.state_dict(), tmp_path / "vae.safetensors"
    scenes = {"size": 32, "num_frames": 5}
    for demo, changed in (
        (
            {"whitening_clips": 3},
            {"quant_conv.weight", "quant_conv.bias", "post_quant_conv.weight", "post_quant_conv.bias"},
        ),
        ({"gather_taps": True}, {name for name, weight in weights.items() if weight.ndim == 5 and weight.shape[2] > 1}),
    ):
        save_file(weights, path)
        settings = DemoSettings.model_validate({**demo, "scenes": scenes})
        finish_autoencoder(path, VAES["hunyuan"], settings, dtype=torch.float32)
        found = load_file(path)
        assert {name for name, weight in weights.items() if not torch.equal(found[name], weight)} == changed
        finish_autoencoder(path, VAES["hunyuan"], settings, dtype=torch.float16)
        assert {weight.dtype for weight in load_file(path).values()} == {torch.float16}
