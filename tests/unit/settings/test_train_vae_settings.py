"""What an autoencoder's objective cannot mean is refused, with setting, value, rule and way out."""

import pytest
from pydantic import ValidationError

from opensora_cli.settings.train import TrainSettings

SMALL = {
    "hunyuan": {"scenes": {"num_frames": 5}},
    "dc_ae": {"scenes": {"num_frames": 8}},
    "flux_ae": {"scenes": {"num_frames": 2}},
}
TABLE = {"table": "clips.csv", "buckets": {"256px": {33: [1.0, 2]}}}


def settings(kind="hunyuan", *, data=None, **objective):
    return TrainSettings.model_validate(
        {"target": "vae", "vae": {"kind": kind}, "data": data or SMALL[kind], "train_vae": objective}
    )


@pytest.mark.parametrize("kind", SMALL)
def test_reconstruction_alone_suits_every_kind(kind):
    chosen = settings(kind).train_vae
    assert chosen.perceptual_weight == chosen.kl_weight == chosen.discriminator.weight == 0


@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        ("hunyuan", {"kl_weight": 1e-6, "picture_steps": 3, "whitening_clips": 4}),
        ("flux_ae", {"kl_weight": 1e-6, "single_frame_share": 0.5}),
        ("dc_ae", {"perceptual_weight": 0.5, "perceptual_files": "vgg16.pth,vgg.pth"}),
        ("dc_ae", {"discriminator": {"weight": 0.05, "start_step": 7}}),
    ],
)
def test_what_goes_together(kind, objective):
    chosen = settings(kind, **objective).train_vae
    assert chosen.model_fields_set == objective.keys()


def test_files_are_split_at_commas():
    chosen = settings(perceptual_weight=0.5, perceptual_files="vgg16.pth, vgg.pth").train_vae
    assert chosen.perceptual_files == ("vgg16.pth", "vgg.pth")


@pytest.mark.parametrize(
    ("kind", "data", "objective", "message"),
    [
        ("dc_ae", None, {"kl_weight": 0.1}, "train_vae.kl_weight=0.1 has no effect with vae.kind=dc_ae.*: use 0"),
        ("hunyuan", None, {"perceptual_files": "a.pth"}, "train_vae.perceptual_files=a.pth has no effect.*use 0.5"),
        ("dc_ae", None, {"picture_steps": 9}, "train_vae.picture_steps=9 .*vae.kind=dc_ae.*single_frame_share"),
        ("hunyuan", TABLE, {"picture_steps": 9}, "train_vae.picture_steps=9 .*data.table.*buckets of 1 frame"),
        ("hunyuan", TABLE, {"whitening_clips": 9}, "train_vae.whitening_clips=9 .*: use 0"),
        ("flux_ae", None, {"whitening_clips": 9}, "train_vae.whitening_clips=9 .*: use 0"),
        ("dc_ae", None, {"decoder_only": True}, "train_vae.decoder_only=true keeps the encoder, .*init=demo"),
        (
            "hunyuan",
            None,
            {"decoder_only": True, "kl_weight": 0.1},
            "kl_weight=0.1 has no effect .*decoder_only.*: use 0",
        ),
        (
            "hunyuan",
            None,
            {"decoder_only": True, "picture_steps": 9},
            "picture_steps=9 changes .*single_frame_share",
        ),
        ("hunyuan", None, {"decoder_only": True, "whitening_clips": 9}, "whitening_clips=9 would change .*: use 0"),
    ],
)
def test_what_contradicts_itself(kind, data, objective, message):
    with pytest.raises(ValidationError, match=message):
        settings(kind, data=data, **objective)


@pytest.mark.parametrize(
    "objective",
    [
        {"single_frame_share": 1.5},
        {"perceptual_weight": -1},
        {"discriminator": {"weight": 0.05, "width": 12}},
        {"discriminator": {"weight": 0.05, "layers": 0}},
        {"discriminator": {"weight": 0.05, "start_step": -1}},
        {"discriminator": {"wieght": 0.05}},
        {"perceptual": 0.5},
    ],
)
def test_bounds(objective):
    with pytest.raises(ValidationError):
        settings(**objective)
