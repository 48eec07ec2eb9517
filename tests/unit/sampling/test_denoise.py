"""The sampling loop, on models simple enough to know the answer."""

import pytest
import torch
from closeness import assert_close

from opensora_cli.core.conditions import condition_mode
from opensora_cli.sampling.denoise import denoise, denoise_distilled, euler_step
from opensora_cli.sampling.guidance import Branch, Guidance, count_evaluations
from opensora_cli.sampling.schedule import flow_timesteps

FRAMES = 3
UNGUIDED = Guidance(guidance_scale=1.0, image_guidance_scale=1.0)


def _timesteps(steps):
    return flow_timesteps(steps, tokens_per_frame=4, num_latent_frames=FRAMES)


def _random(seed, dtype=torch.float32):
    return torch.randn(2, FRAMES * 4, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _run(velocity, noise, *, steps, guidance=UNGUIDED, mode="t2v"):
    return denoise(
        velocity,
        noise,
        timesteps=_timesteps(steps),
        guidance=guidance,
        mode=condition_mode(mode),
        num_latent_frames=FRAMES,
    )


def test_euler_step_towards_data():
    latents, velocity = torch.tensor([[[2.0]]]), torch.tensor([[[4.0]]])
    assert euler_step(latents, velocity, t=0.75, t_next=0.5).item() == 1.0


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_straight_paths_are_followed_exactly(steps):
    noise, data = _random(0), _random(1)
    result = _run(lambda _latents, _t, branches: dict.fromkeys(branches, noise - data), noise, steps=steps)
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
    assert evaluations == count_evaluations(
        Guidance(), mode=condition_mode(mode), num_inference_steps=steps, num_latent_frames=FRAMES
    )
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


def test_latents_keep_their_dtype_between_steps():
    seen = []

    def velocity(latents, _t, branches):
        seen.append(latents.dtype)
        return {branch: latents.float() for branch in branches}

    result = _run(velocity, _random(0, torch.bfloat16), steps=3)
    assert {*seen, result.dtype} == {torch.bfloat16}


def test_the_noise_is_left_as_it_was():
    noise = _random(0)
    _run(lambda latents, _t, branches: dict.fromkeys(branches, latents), noise, steps=3)
    assert torch.equal(noise, _random(0))


@pytest.mark.parametrize("done", range(7))
def test_a_run_goes_on_from_any_step_to_the_same_latents(done):
    def velocity(latents, t, branches):
        return {branch: latents.sin() * t + index for index, branch in enumerate(branches)}

    reached = [_random(0, torch.bfloat16)]
    timesteps, options = _timesteps(7), {"mode": condition_mode("t2v"), "num_latent_frames": FRAMES}
    options |= {"timesteps": timesteps, "guidance": Guidance()}

    def keep(steps, latents, velocity):
        assert steps == len(reached)
        assert torch.equal(latents, euler_step(reached[-1], velocity, t=timesteps[steps - 1], t_next=timesteps[steps]))
        reached.append(latents)

    whole = denoise(velocity, reached[0], on_step=keep, **options)
    assert (len(reached), reached[-1] is whole) == (8, True)
    seen = []
    rest = denoise(velocity, reached[done], steps_done=done, on_step=lambda steps, *_: seen.append(steps), **options)
    assert torch.equal(rest, whole)
    assert torch.equal(denoise(velocity, reached[0], stop_at=max(done, 1), **options), reached[max(done, 1)])
    assert seen == [*range(done + 1, 8)]
    counted = {"mode": condition_mode("t2v"), "num_inference_steps": 7, "num_latent_frames": FRAMES}
    assert count_evaluations(Guidance(), **counted, steps_done=done) == 2 * (7 - done)


def test_distilled_sampling_takes_one_evaluation_a_step():
    noise, data = _random(0), _random(1)
    times = []

    def velocity(_latents, t):
        times.append(t)
        return noise - data

    timesteps = _timesteps(6)
    result = denoise_distilled(velocity, noise, timesteps=timesteps)
    assert_close(result, data)
    assert times == timesteps[:-1]
    denoise_distilled(velocity, noise, timesteps=timesteps, steps_done=4)
    assert times == [*timesteps[:-1], *timesteps[4:-1]]


def test_a_run_needs_a_step():
    with pytest.raises(ValueError, match="at least two timesteps, not 1"):
        denoise_distilled(lambda latents, _t: latents, _random(0), timesteps=[1.0])
