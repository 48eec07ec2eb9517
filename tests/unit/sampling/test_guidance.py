"""Three-branch guidance: its result, and how few evaluations it takes."""

from dataclasses import replace

import pytest
import torch
from closeness import assert_close

from opensora_cli.core.choices import Solver
from opensora_cli.core.conditions import condition_mode
from opensora_cli.sampling.guidance import (
    UNGUIDED,
    Branch,
    Guidance,
    GuidanceScales,
    branches_needed,
    combine_branches,
    count_evaluations,
    guidance_scales,
    mean_scale,
    oscillating_scale,
)

PRESET = Guidance()
T2V, I2V, V2V = (condition_mode(name) for name in ("t2v", "i2v_head", "v2v_head"))


def _all_scales(guidance, mode, *, steps=50, frames=33):
    times = tuple(1 - step / steps for step in range(steps + 1))
    return guidance_scales(guidance, mode=mode, timesteps=times, num_latent_frames=frames)


def _scales(step, guidance, mode):
    return _all_scales(guidance, mode, frames=5)[step]


def test_heun_evaluates_each_branch_twice_but_in_the_last_step():
    scales = _all_scales(PRESET, T2V, steps=14)
    assert count_evaluations(scales, solver=Solver.AB2) == 26
    # The last step is unguided.
    assert count_evaluations(scales, solver=Solver.HEUN) == 2 * 25 + 1
    assert count_evaluations(scales, solver=Solver.HEUN, steps_done=12, ranks=2) == 2 * 1 + 1


def test_outside_of_the_interval_nothing_guides():
    guidance = Guidance(interval=(0.25, 0.75), text_oscillation=False, image_oscillation=False)
    scales = _all_scales(guidance, I2V, steps=8)
    assert [branches_needed(each) == (COND,) for each in scales] == [step in (0, 1, 7) for step in range(8)]
    assert scales[7] == UNGUIDED
    assert scales[2:7] == _all_scales(replace(guidance, interval=(0.0, 1.0)), I2V, steps=8)[2:7]


COND, UNCOND, UNCOND2 = Branch.COND, Branch.UNCOND, Branch.UNCOND2


@pytest.mark.parametrize(
    ("text", "image", "branches"),
    [
        (7.5, (3.0,), (UNCOND2, UNCOND, COND)),
        (1.0, (3.0,), (UNCOND2, UNCOND, COND)),
        (7.5, (1.0,), (UNCOND, COND)),
        (1.0, (1.0,), (COND,)),
        (3.0, (3.0,), (UNCOND2, COND)),
        (0.0, (3.0,), (UNCOND2, UNCOND)),
        (0.0, (1.0,), (UNCOND,)),
        (0.0, (0.0,), (UNCOND2,)),
        (7.5, (1.0, 2.0, 3.0), (UNCOND2, UNCOND, COND)),
        (7.5, (1.0, 1.0, 1.0), (UNCOND, COND)),
        (1.0, (1.0, 1.0, 1.0), (COND,)),
        (1.0, (1.0, 1.0, 3.0), (UNCOND2, UNCOND, COND)),
    ],
)
def test_only_branches_that_count_are_needed(text, image, branches):
    scales = GuidanceScales(text, image)
    assert branches_needed(scales) == branches
    velocities = _velocities(frames=3)
    # The left-out branches are left out for good: with any other values the result is the same.
    guided = combine_branches({branch: velocities[branch] for branch in branches}, scales)
    assert_close(guided, _published_formula(velocities, scales, tokens_per_frame=4))


def _velocities(*, frames, batch=2, tokens_per_frame=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shape = (batch, frames * tokens_per_frame, 6)
    return {branch: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for branch in Branch}


def _published_formula(velocities, scales, *, tokens_per_frame):
    cond, uncond, uncond2 = (velocities[branch] for branch in (COND, UNCOND, UNCOND2))
    image = torch.tensor(scales.image, dtype=cond.dtype)
    if len(scales.image) > 1:
        image = torch.cat([value.expand(tokens_per_frame) for value in image])[:, None]
    return uncond2 + image * (uncond - uncond2) + scales.text * (cond - uncond)


def test_oscillation_starts_at_step_ten_and_spares_even_steps():
    assert [oscillating_scale(7.5, step) for step in range(8, 14)] == [7.5, 7.5, 7.5, 1.0, 7.5, 1.0]


def test_the_mean_is_that_of_two_neighbouring_steps_of_the_run_that_it_is_of():
    of_run = [oscillating_scale(7.5, step) for step in range(50)]
    means = [sum(of_run[step : step + 2]) / 2 for step in range(0, 50, 2)]
    assert [mean_scale(7.5, step, num_steps=25, mean_of=50) for step in range(25)] == means
    # A third of the way of 30 steps is step 5 of 15.
    assert [mean_scale(4.0, step, num_steps=15, mean_of=30) for step in (0, 4, 5, 14)] == [4.0, 4.0, 2.5, 2.5]


def test_with_the_mean_every_step_is_guided_and_image_guidance_grows_half_as_much():
    mean = replace(PRESET, mean_of=50)
    assert count_evaluations(_all_scales(mean, T2V, steps=15)) == 30
    assert count_evaluations(_all_scales(mean, I2V, steps=15)) == 45
    assert _scales(0, mean, I2V) == _scales(0, PRESET, I2V)
    assert _scales(48, mean, I2V).text == 4.25
    assert _scales(48, mean, I2V).image == pytest.approx([1.0, 1.01, 1.02, 1.03, 1.04])
    steady = replace(mean, text_oscillation=False, temporal_image_scaling=False)
    assert _scales(49, steady, I2V) == GuidanceScales(7.5, (2.0,))


@pytest.mark.parametrize(
    ("text_oscillation", "image_oscillation", "scales"),
    [(True, True, (1.0, 1.0)), (True, False, (1.0, 3.0)), (False, True, (7.5, 1.0)), (False, False, (7.5, 3.0))],
)
def test_text_and_image_oscillate_on_their_own(text_oscillation, image_oscillation, scales):
    guidance = Guidance(
        text_oscillation=text_oscillation, image_oscillation=image_oscillation, temporal_image_scaling=False
    )
    at_odd_step = _scales(11, guidance, I2V)
    assert (at_odd_step.text, *at_odd_step.image) == scales
    assert _scales(10, guidance, I2V) == GuidanceScales(7.5, (3.0,))


def test_image_guidance_grows_along_the_clip_and_fades_over_the_run():
    assert _scales(0, PRESET, I2V).image == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0])
    assert _scales(25, PRESET, I2V).image == (1.0,)
    assert _scales(24, PRESET, I2V).image[-1] == pytest.approx(3.0 - 2.0 * 24 / 50)
    assert _scales(48, PRESET, I2V).image == pytest.approx([1.0, 1.02, 1.04, 1.06, 1.08])


def test_scales_of_frames_need_tokens_of_whole_frames():
    velocities = {branch: torch.zeros(1, 7, 2) for branch in Branch}
    with pytest.raises(ValueError, match="7 tokens do not divide into 3 latent frames"):
        combine_branches(velocities, GuidanceScales(7.5, (1.0, 2.0, 3.0)))
