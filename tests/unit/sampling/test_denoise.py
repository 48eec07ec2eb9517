"""The sampling loop, on models simple enough to know the answer."""

import itertools

import pytest
import torch
from closeness import assert_close

from opensora_cli.core.choices import Solver
from opensora_cli.core.conditions import condition_mode
from opensora_cli.sampling.denoise import denoise, euler_step, last_times
from opensora_cli.sampling.guidance import (
    NO_GUIDANCE,
    Branch,
    Guidance,
    branches_needed,
    count_evaluations,
    guidance_scales,
)
from opensora_cli.sampling.schedule import flow_timesteps
from opensora_cli.sampling.step_cache import cached_steps

FRAMES = 3


def _timesteps(steps):
    return flow_timesteps(steps, tokens_per_frame=4, num_latent_frames=FRAMES)


def _random(seed, dtype=torch.float32):
    return torch.randn(2, FRAMES * 4, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _scales(guidance, *, steps, mode="t2v"):
    times = tuple(_timesteps(steps))
    return guidance_scales(guidance, mode=condition_mode(mode), timesteps=times, num_latent_frames=FRAMES)


def _run(velocity, noise, *, steps, guidance=NO_GUIDANCE, mode="t2v", solver=Solver.EULER):
    scales = _scales(guidance, steps=steps, mode=mode)
    return denoise(velocity, noise, timesteps=_timesteps(steps), scales=scales, solver=solver)


@pytest.mark.parametrize("solver", Solver)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_straight_paths_are_followed_exactly(steps, solver):
    noise, data = _random(0), _random(1)
    result = _run(
        lambda _latents, _t, branches: dict.fromkeys(branches, noise - data), noise, steps=steps, solver=solver
    )
    assert_close(result, data)


def test_the_model_sees_the_latents_of_its_time():
    noise, data = _random(0), _random(1)

    def velocity(latents, t, branches):
        # On the straight path the data can be told from any point of it, at the right time only.
        assert_close(latents, data + t * (noise - data))
        return dict.fromkeys(branches, (latents - data) / t)

    assert_close(_run(velocity, noise, steps=5), data)


@pytest.mark.parametrize(("mode", "steps", "evaluations"), [("t2v", 50, 80), ("i2v_head", 50, 110)])
def test_the_model_is_evaluated_as_often_as_counted(mode, steps, evaluations):
    calls = []

    def velocity(latents, t, branches):
        calls.extend((t, branch) for branch in branches)
        return dict.fromkeys(branches, latents)

    _run(velocity, _random(0), steps=steps, guidance=Guidance(), mode=mode)
    assert len(calls) == len(set(calls)) == evaluations
    assert evaluations == count_evaluations(_scales(Guidance(), steps=steps, mode=mode))
    if mode == "t2v":
        assert Branch.UNCOND2 not in {branch for _, branch in calls}


def test_guidance_pushes_away_from_the_negative_prompt():
    noise = torch.zeros(1, FRAMES * 4, 6)
    values = {Branch.COND: 3.0, Branch.UNCOND: 2.0, Branch.UNCOND2: 1.0}

    def velocity(latents, _t, branches):
        return {branch: torch.full_like(latents, values[branch]) for branch in branches}

    guidance = Guidance(guidance_scale=5.0, image_guidance_scale=4.0, temporal_image_scaling=False)
    result = _run(velocity, noise, steps=1, guidance=guidance, mode="i2v_head")
    assert_close(result, torch.full_like(noise, -(1.0 + 4.0 * 1.0 + 5.0 * 1.0)))


def _sines():
    """Return a velocity that keeps what a step cache is to use again."""
    kept = {}

    def velocity(latents, t, branches, cached=None):
        if cached is None or not cached.is_reused:
            kept[branches] = latents.sin()
        return {branch: kept[branches] * t + latents + index for index, branch in enumerate(branches)}

    return velocity


@pytest.mark.parametrize(
    ("solver", "caches"), [*itertools.product(Solver, [False]), (Solver.EULER, True), (Solver.AB2, True)]
)
@pytest.mark.parametrize("done", [0, 1, 2, 7, 13])
def test_a_run_goes_on_from_any_step_to_the_same_latents(done, solver, caches):
    velocity = _sines()
    timesteps, scales = _timesteps(14), _scales(Guidance(), steps=14)
    cache = cached_steps(scales, timesteps, largest_change=0.3) if caches else None
    options = {"timesteps": timesteps, "scales": scales, "solver": solver, "cache": cache}
    reached, pasts = [_random(0, torch.bfloat16)], [{}]

    def keep(step):
        assert step.steps_done == len(reached)
        t, t_next = timesteps[step.steps_done - 1], timesteps[step.steps_done]
        if solver is Solver.EULER:
            assert torch.equal(step.packed_latents_BND, euler_step(reached[-1], step.velocity_BND, t=t, t_next=t_next))
        reached.append(step.packed_latents_BND)
        pasts.append(step.past)

    whole = denoise(velocity, reached[0], on_step=keep, **options)
    assert (len(reached), reached[-1] is whole) == (15, True)
    times = last_times(scales, timesteps, solver=solver, cache=cache, begun_at=0, steps_done=done)
    assert {key: past.t for key, past in pasts[done].items()} == times
    seen = []
    rest = denoise(
        _sines(),
        reached[done],
        steps_done=done,
        past=pasts[done],
        on_step=lambda step: seen.append(step.steps_done),
        **options,
    )
    assert torch.equal(rest, whole)
    assert torch.equal(denoise(velocity, reached[0], stop_at=max(done, 1), **options), reached[max(done, 1)])
    assert seen == [*range(done + 1, 15)]


def test_ab2_follows_a_velocity_that_is_linear_in_time_exactly_branch_by_branch():
    """Also where a branch is evaluated at every second step alone; the first step of each is Euler's."""
    factors = {Branch.UNCOND: 1.0, Branch.COND: 2.0}
    guidance, timesteps = Guidance(guidance_scale=3.0), _timesteps(14)
    scales = _scales(guidance, steps=14)

    def velocity(latents, t, branches):
        return {branch: torch.full_like(latents, factors[branch] * t) for branch in branches}

    expected = 0.0
    for step, (t, t_next) in enumerate(itertools.pairwise(timesteps)):
        guided = scales[step].text * factors[Branch.COND] + (1 - scales[step].text) * factors[Branch.UNCOND]
        expected += guided * ((t + t_next) / 2 if step else t) * (t_next - t)

    noise = torch.zeros(1, FRAMES * 4, 6, dtype=torch.float64)
    assert {len(branches_needed(each)) for each in scales} == {1, 2}
    result = denoise(velocity, noise, timesteps=timesteps, scales=scales, solver=Solver.AB2)
    assert_close(result, torch.full_like(noise, expected))
