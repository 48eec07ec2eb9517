"""What the transformer's objective refuses."""

import pytest

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.settings.components import ModelSettings
from opensora_cli.settings.train_objectives import MMDiTTrainSettings, ModeWeights

MODEL = ModelSettings()
CAUSAL = LatentGrid(latent_channels=16, time_compression_ratio=4, spatial_compression_ratio=8, is_causal=True)
DC_AE = LatentGrid(latent_channels=128, time_compression_ratio=4, spatial_compression_ratio=32, is_causal=False)


def only(*modes):
    return MMDiTTrainSettings(mode_weights=ModeWeights(**{mode: float(mode in modes) for mode in CONDITION_MODES}))


def problems(settings, *, model=MODEL, grid=CAUSAL, longest=129):
    return settings.problems(model=model, grid=grid, longest=longest, procedural=True)


def test_the_released_models_are_fine():
    assert problems(MMDiTTrainSettings()) == []
    assert problems(only("t2v", "i2v_head", "i2v_tail", "i2v_loop")) == []
    distilled = MODEL.model_copy(update={"guidance_embed": True, "cond_embed": False})
    assert problems(only("t2v"), model=distilled, longest=1) == []
    dc_ae = MODEL.model_copy(update={"in_channels": 128, "patch_size": 1})
    assert problems(only("t2v", "i2v_head", "v2v_head_easy"), model=dc_ae, grid=DC_AE, longest=128) == []


def test_channels_must_be_those_of_the_latents():
    [problem] = problems(only("t2v"), grid=DC_AE, longest=128)
    assert problem == (
        "model.in_channels=64 must be the autoencoder's latent channels (128) x model.patch_size=2 squared: use 512"
    )


def test_a_model_that_takes_no_reference_learns_t2v_alone():
    model = MODEL.model_copy(update={"cond_embed": False})
    [problem] = problems(only("t2v", "i2v_head"), model=model)
    assert problem == "train_mmdit.mode_weights must be 0 but for t2v with model.cond_embed=false"
    assert problems(only("t2v"), model=model) == []


@pytest.mark.parametrize(
    ("mode", "grid", "longest", "shortest"),
    [
        ("i2v_head", CAUSAL, 1, 5),
        ("i2v_loop", CAUSAL, 5, 9),
        ("v2v_head", CAUSAL, 33, 37),
        ("v2v_tail_easy", CAUSAL, 65, 69),
        ("v2v_head", DC_AE, 32, 36),
        ("v2v_tail_easy", DC_AE, 64, 68),
    ],
)
def test_some_clip_must_leave_something_to_learn(mode, grid, longest, shortest):
    model = MODEL.model_copy(update={"in_channels": grid.latent_channels * 4})
    [problem] = problems(only("t2v", mode), model=model, grid=grid, longest=longest)
    assert problem.startswith(f"the longest clip has {longest} frame")
    assert f"at least {shortest}," in problem
    assert problems(only("t2v", mode), model=model, grid=grid, longest=shortest) == []


def test_every_length_that_a_clip_may_have_by_mistake_is_judged():
    """Lengths that the autoencoder cannot encode are refused elsewhere, not here by an exception."""
    assert problems(only("t2v", "i2v_head"), longest=7) == []
