"""Rules of the autoencoder's objective beside those of `test_train_rules.py`."""

import pytest
from pydantic import ValidationError

from opensora_cli.settings.train import TrainSettings

FRAMES = {"hunyuan": 5, "dc_ae": 8, "flux_ae": 2}


def settings(kind, **objective):
    data = {"buckets": {"256px": {FRAMES[kind]: (1.0, 1)}}}
    return TrainSettings.model_validate({"target": "vae", "vae": {"kind": kind}, "data": data, "train_vae": objective})


@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        ("hunyuan", {"kl_weight": 1e-6}),
        ("flux_ae", {"kl_weight": 1e-6, "single_frame_share": 0.5}),
        ("dc_ae", {"perceptual_weight": 0.5, "perceptual_files": "vgg16.pth,vgg.pth"}),
        ("dc_ae", {"discriminator": {"weight": 0.05, "start_step": 7}}),
    ],
)
def test_valid_objectives(kind, objective):
    assert settings(kind, **objective).train_vae.model_fields_set == objective.keys()


@pytest.mark.parametrize(
    ("kind", "objective", "message"),
    [
        ("dc_ae", {"kl_weight": 0.1}, "train_vae.kl_weight=0.1 has no effect with vae.kind=dc_ae.*: use 0"),
        ("hunyuan", {"perceptual_files": "a.pth"}, "train_vae.perceptual_files=a.pth has no effect.*use 0.5"),
        ("hunyuan", {"decoder_only": True, "kl_weight": 0.1}, "kl_weight=0.1 has no effect .*decoder_only.*: use 0"),
        ("hunyuan", {"crop_size": 30}, "train_vae.crop_size=30 must be a multiple of 8, the side of a latent"),
    ],
)
def test_broken_rules(kind, objective, message):
    with pytest.raises(ValidationError, match=message):
        settings(kind, **objective)
