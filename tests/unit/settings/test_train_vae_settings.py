"""Rules of the autoencoder's objective beside those of `test_train_rules.py`."""

import pytest
from pydantic import ValidationError

from opensora_cli.settings.train import TrainSettings

FRAMES = {"hunyuan": 5, "dc_ae": 8, "flux_ae": 2}


def settings(kind, **objective):
    data = {"buckets": {"256px": {FRAMES[kind]: (1.0, 1)}}}
    return TrainSettings.model_validate({"target": "vae", "vae": {"kind": kind}, "data": data, "train_vae": objective})


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
