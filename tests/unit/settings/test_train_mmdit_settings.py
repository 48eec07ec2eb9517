"""Rules of the transformer's objective."""

import pytest
from pydantic import ValidationError

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.settings.explain import explain
from opensora_cli.settings.train import TrainSettings

CAUSAL = {"vae": {"kind": "hunyuan"}}
DC_AE = {"vae": {"kind": "dc_ae"}, "model": {"in_channels": 512}}


def problems(*modes, longest, **sections):
    """Return the broken rules of a training run on clips of `longest` frames."""
    weights = {"mode_weights": {mode: float(mode in modes) for mode in CONDITION_MODES}} if modes else {}
    values = {
        "target": "mmdit",
        "init": "demo",
        "data": {"buckets": {"256px": {longest: (1.0, 1)}}},
        "train_mmdit": weights,
        **sections,
    }
    try:
        TrainSettings.model_validate(values)
    except ValidationError as error:
        return explain(error)
    return []


def test_the_released_models_are_fine():
    assert problems(longest=129) == []
    assert problems("t2v", "i2v_head", "i2v_tail", "i2v_loop", longest=129) == []
    assert problems("t2v", longest=1, model={"guidance_embed": True, "cond_embed": False}) == []
    assert problems("t2v", "i2v_head", "v2v_head_easy", longest=128, **DC_AE) == []


def test_channels_must_be_those_of_the_latents():
    assert problems("t2v", longest=128, vae={"kind": "dc_ae"}) == [
        "model.in_channels=64 must be the autoencoder's latent channels (128) x model.patch_size=2 squared: use 512"
    ]


def test_a_model_that_takes_no_reference_learns_t2v_alone():
    model = {"cond_embed": False}
    assert problems("t2v", "i2v_head", longest=129, model=model) == [
        "train_mmdit.mode_weights must be 0 except for t2v with model.cond_embed=false"
    ]
    assert problems("t2v", longest=129, model=model) == []


@pytest.mark.parametrize(
    ("mode", "sections", "longest", "shortest"),
    [
        ("i2v_head", CAUSAL, 1, 5),
        ("i2v_loop", CAUSAL, 5, 9),
        ("v2v_head", CAUSAL, 33, 37),
        ("v2v_tail_easy", CAUSAL, 65, 69),
        ("v2v_head", DC_AE, 32, 36),
        ("v2v_tail_easy", DC_AE, 64, 68),
    ],
)
def test_some_clip_must_leave_something_to_learn(mode, sections, longest, shortest):
    [problem] = problems("t2v", mode, longest=longest, **sections)
    assert problem.startswith(f"clips of {longest} frames leave nothing")
    assert f"at least {shortest} frames," in problem
    assert problems("t2v", mode, longest=shortest, **sections) == []
