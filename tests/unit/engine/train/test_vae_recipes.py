"""The packaged recipes of autoencoders: they parse, agree with the reference, and train when they are shrunk."""

import json
from pathlib import Path

import pytest
import tiny_training
from safetensors.torch import load_file

from opensora_cli.engine.train.run import train
from opensora_cli.settings.explain import Given
from opensora_cli.settings.train import load_train_settings

CLIPS = {
    "data.table": tiny_training.TABLE,
    "data.workers": "0",
    "loop.steps": "30",
    "loop.log_every": "1",
    "checkpoints.every": "100",
    "device": "cpu",
    "optimizer.learning_rate": "2e-3",
}
HUNYUAN = {
    "data.buckets": "{32px: {5: [1.0, 2]}}",
    "vae.latent_channels": "4",
    "vae.block_out_channels": "4,8",
    "vae.layers_per_block": "1",
    "vae.norm_num_groups": "2",
    "vae.time_compression_ratio": "2",
    "vae.spatial_compression_ratio": "4",
}
DC_AE = {
    "data.buckets": "{32px: {4: [1.0, 2]}}",
    "vae.dc_ae.latent_channels": "8",
    "vae.dc_ae.block_types": "res,efficientvit",
    "vae.dc_ae.width_list": "8,32",
    "vae.dc_ae.encoder_depth_list": "1,1",
    "vae.dc_ae.decoder_depth_list": "1,1",
    "vae.dc_ae.temporal": "true,false",
}
DISCRIMINATOR = {"train_vae.discriminator.width": "8", "train_vae.discriminator.layers": "2"}
SHRUNK = {
    "vae_hunyuan": {**CLIPS, **HUNYUAN, **DISCRIMINATOR, "train_vae.discriminator.start_step": "20"},
    "vae_dc_ae": {**CLIPS, **DC_AE},
    "vae_dc_ae_disc": {**CLIPS, **DC_AE, **DISCRIMINATOR, "init": "none"},
}
OPPOSED_STEPS = {"vae_hunyuan": 10, "vae_dc_ae": 0, "vae_dc_ae_disc": 30}


def settings_of(name, **overrides):
    given = {key: Given(value, "the test") for key, value in overrides.items()}
    return load_train_settings(config=Path(name), overrides=given, environment={})


def test_stages_of_the_reference():
    first, second = settings_of("vae_dc_ae"), settings_of("vae_dc_ae_disc")
    for settings in (first, second):
        assert (settings.optimizer.learning_rate, settings.loop.ema_decay) == (5e-5, 0.99)
        assert (settings.train_vae.perceptual_weight, settings.train_vae.kl_weight) == (0.5, 0.0)
        assert settings.train_vae.squared_error_weight == 0.0
    assert first.train_vae.discriminator.weight == 0.0
    assert second.train_vae.discriminator.weight == 0.05
    assert second.train_vae.discriminator.learning_rate == 1e-4
    assert second.init == f"{first.output}/vae.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHRUNK)
def test_shrunk_it_trains_and_its_loss_falls(name, tmp_path):
    train(settings_of(name, output=str(tmp_path), **SHRUNK[name]))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert ["adversary_loss" in line for line in lines].count(True) == OPPOSED_STEPS[name]
    first, last = ([line["psnr"] for line in lines[part]] for part in (slice(6), slice(-6, None)))
    assert sum(last) > sum(first) + 6.0  # a decibel in each
    if not OPPOSED_STEPS[name]:
        losses = [line["loss"] for line in lines]
        assert sum(losses[-6:]) < 0.8 * sum(losses[:6])
    assert load_file(tmp_path / "vae.safetensors")
