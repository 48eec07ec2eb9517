"""Distribution matching of a few-step adapter of the demo: gradients of both adapters, and memory."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from closeness import assert_close
from tiny_distillation import batch, new_task, random_task, settings_of
from torch import Tensor

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.train.estimate import estimate_training, measure_training
from opensora_cli.engine.train.lora import CRITIC
from opensora_cli.engine.train.objectives import find_objective
from opensora_cli.engine.train.objectives.distill import teacher_guidance
from opensora_cli.engine.train.objectives.dmd import DMDTask
from opensora_cli.engine.train.trainer import MODEL
from opensora_cli.memory.checkpointing import set_grad_checkpoint
from opensora_cli.sampling.guidance import Branch, guidance_scales
from opensora_cli.sampling.schedule import flow_timesteps
from opensora_cli.settings.train import TrainSettings


def dmd_settings(output: Path, **changes: object) -> TrainSettings:
    return settings_of(output, target="dmd", train_distill__critic_steps=2, **changes)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> DMDTask:
    """Return the task with random adapters; new ones change nothing."""
    settings = dmd_settings(tmp_path_factory.mktemp("dmd"), train_distill__image_guidance_scale=2.0)
    return random_task(settings)


class Evaluation(NamedTuple):
    """Evaluation of the model by one of its parts."""

    part: str
    branch: Branch
    t: float
    has_gradient: bool
    latents_BND: Tensor
    velocity_BND: Tensor


@pytest.fixture
def evaluations(task, monkeypatch) -> list[Evaluation]:
    """Record the evaluations of the task."""
    found = []
    evaluate = DMDTask._evaluate

    def recorded(self, clips, latents_BND, t, branch, **given):
        velocity_BND = evaluate(self, clips, latents_BND, t, branch, **given)
        layer = next(layer for layer in self.module.modules() if hasattr(layer, "base_layer"))
        part = "teacher" if layer._disable_adapters else layer._active_adapter[0]
        found.append(Evaluation(part, branch, t, torch.is_grad_enabled(), latents_BND, velocity_BND))
        return velocity_BND

    monkeypatch.setattr(DMDTask, "_evaluate", recorded)
    return found


def learned_by(task: DMDTask, loss: Tensor) -> set[str]:
    """Return the adapters to which the gradient of a loss comes."""
    task.module.zero_grad()
    loss.backward()
    weights = [name for name, weight in task.module.named_parameters() if weight.grad is not None]
    assert all(".lora_" in name for name in weights)
    return {name.split(".")[-2] for name in weights}


def test_the_gradient_is_the_direction_from_the_teacher_to_the_critic(task, evaluations):
    task._step = 1
    losses = task.losses(batch(), SampleRng.of(0, 0))
    role, loss, figures = next(losses)
    assert (role, figures) == (MODEL, {})
    noise, student, critic, *teacher = evaluations
    # A step of the adapter from noise without a gradient, and the one that learns.
    assert [(each.part, each.branch, each.has_gradient) for each in (noise, student)] == [
        ("default", Branch.COND, False),
        ("default", Branch.COND, True),
    ]
    assert [(each.part, each.branch) for each in teacher] == [("teacher", branch) for branch in Branch]
    assert (critic.part, critic.branch) == ("critic", Branch.COND)
    clips = task.prepare(batch(), SampleRng.of(0, 0))
    frames, rows, columns = clips.grid
    own, usual = (flow_timesteps(count, tokens_per_frame=rows * columns, num_latent_frames=frames) for count in (2, 4))
    assert [noise.t, student.t] == own[:2]
    assert torch.equal(student.latents_BND, clips.noise_BND + (own[1] - own[0]) * noise.velocity_BND)
    data_BND = (student.latents_BND - own[1] * student.velocity_BND).detach()
    # Teacher and critic judge the predicted clips at one of the teacher's times. Each clip has the scales of its mode.
    assert critic.t in usual[:-1]
    for each in teacher:
        assert each.t == critic.t
        assert torch.equal(each.latents_BND, critic.latents_BND)
    uncond2, uncond, cond = (each.velocity_BND for each in teacher)
    guided = []
    guidance = teacher_guidance(task._run)
    for index, mode in enumerate(clips.modes):
        scales = guidance_scales(guidance, mode=mode, timesteps=tuple(usual), num_latent_frames=frames)[
            usual.index(critic.t)
        ]
        image_N1 = torch.tensor(scales.image).repeat_interleave(data_BND.shape[1] // len(scales.image))[:, None]
        of_image, of_text = uncond[index] - uncond2[index], cond[index] - uncond[index]
        guided.append(uncond2[index] + image_N1 * of_image + scales.text * of_text)
    real_BND, fake_BND = (critic.latents_BND - critic.t * each for each in (torch.stack(guided), critic.velocity_BND))
    away_BND = (fake_BND - real_BND) / (data_BND - real_BND).abs().mean((1, 2), keepdim=True)
    assert_close(loss.detach(), 0.5 * away_BND.square().mean(), tolerance=1e-4)
    assert learned_by(task, loss) == {"default"}


def test_the_critic_learns_to_denoise_the_clips_of_the_adapter(task, evaluations):
    task._step = 0
    (_, _, _), (role, loss, figures) = task.losses(batch(), SampleRng.of(0, 0))
    assert (role, figures) == (CRITIC, {})
    student, critic = evaluations[0], evaluations[-1]
    assert (critic.part, critic.branch, critic.has_gradient) == ("critic", Branch.COND, True)
    data_BND = (student.latents_BND - student.velocity_BND).detach()
    # From x = (1-t)·data + t·noise follows noise - data = (x - data) / t.
    wanted_BND = (critic.latents_BND - data_BND) / critic.t
    assert_close(loss.detach(), (critic.velocity_BND.detach() - wanted_BND).square().mean(), tolerance=1e-4)
    assert learned_by(task, loss) == {CRITIC}


@pytest.mark.slow
def test_blocks_that_are_computed_again_have_the_adapter_of_their_loss(task):
    task.begin_step(0)

    def gradients() -> dict[str, Tensor]:
        task.module.zero_grad()
        for _, loss, _ in task.losses(batch(), SampleRng.of(0, 0)):
            loss.backward()
        return {name: weight.grad for name, weight in task.module.named_parameters() if weight.grad is not None}

    expected = gradients()
    with set_grad_checkpoint(task.module):
        found = gradients()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], gradient, atol=1e-7) for name, gradient in expected.items())


def test_only_the_critic_learns_between_steps_of_the_adapter(task, evaluations):
    roles = []
    for step in range(2):
        task.begin_step(step)
        roles.append([role for role, _, _ in task.losses(batch(), SampleRng.of(0, step))])
    assert roles == [[MODEL, CRITIC], [CRITIC]]
    assert not any(each.has_gradient for each in evaluations if each.part == "teacher")


@pytest.mark.parametrize(("image", "modes", "branches"), [(2.0, {}, 3), (1.0, {}, 2), (2.0, {"t2v"}, 2)])
def test_the_predicted_evaluations_are_those_of_a_task(tmp_path, image, modes, branches):
    weights = {f"train_mmdit__mode_weights__{name}": 0 for name in CONDITION_MODES if modes and name not in modes}
    settings = dmd_settings(tmp_path, train_distill__image_guidance_scale=image, **weights)
    assert len(new_task(settings)._branches) == branches
    # Half a step of the adapter in the mean, and the one that learns. In every second update it is judged by all
    # branches of the teacher and by the critic, and its backward pass counts as one.
    assert find_objective(settings).evaluations(settings) == 0.5 + 1 + (branches + 1 + 1) / 2


@pytest.mark.slow
def test_the_memory_of_both_adapters_is_estimated(tmp_path):
    few = {"model__depth": 1, "model__depth_single_blocks": 2}
    settings = dmd_settings(tmp_path, train_distill__image_guidance_scale=2.0, **few)
    expected, found = estimate_training(settings).rank, measure_training(settings).rank
    assert expected.at_peak == pytest.approx(found.at_peak, rel=0.01)
    assert expected.device_peak_bytes == pytest.approx(found.device_peak_bytes, rel=0.01)
