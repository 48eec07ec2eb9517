"""Distillation of the demo to few steps: what is learned, and what the adapter's file states."""

import json

import pytest
import torch
from closeness import assert_close
from safetensors import safe_open
from tiny_distillation import batch, new_task, random_task, settings_of

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import RequestError
from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.components.few_steps import METADATA_KEY, asked_sampling
from opensora_cli.engine.train.objectives import find_objective
from opensora_cli.engine.train.objectives.distill import DistillTask, teacher_guidance
from opensora_cli.engine.train.run import train
from opensora_cli.sampling.guidance import Branch, guidance_scales
from opensora_cli.sampling.schedule import flow_timesteps
from opensora_cli.settings.load import load_preset


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> DistillTask:
    """Return the task with a random adapter; a new one changes nothing."""
    settings = settings_of(tmp_path_factory.mktemp("distill"), train_distill__image_guidance_scale=2.0)
    return random_task(settings)


def test_the_loss_is_the_distance_from_the_end_of_the_guided_steps(task, monkeypatch):
    calls = []
    evaluate = DistillTask._evaluate

    def recorded(self, clips, latents_BND, t, branch, **given):
        is_off = any(getattr(layer, "_disable_adapters", False) for layer in self.module.modules())
        velocity_BND = evaluate(self, clips, latents_BND, t, branch, **given)
        calls.append((t, branch, is_off, torch.is_grad_enabled(), latents_BND, velocity_BND))
        return velocity_BND

    monkeypatch.setattr(DistillTask, "_evaluate", recorded)
    task._step = 1
    loss, figures = task.loss(batch(), SampleRng.of(0, 0))
    assert figures == {}
    student, *teacher, learned = calls
    # One step of the student from noise, two of the teacher in three branches, and the step that is learned.
    assert [(branch, is_off, grad) for _, branch, is_off, grad, *_ in (student, learned)] == [
        (Branch.COND, False, False),
        (Branch.COND, False, True),
    ]
    assert [branch for _, branch, *_ in teacher] == [*Branch] * 2
    assert all(is_off and not grad for _, _, is_off, grad, *_ in teacher)
    times = [student[0], teacher[0][0], teacher[3][0]]
    assert times[0] == 1.0
    assert times == sorted(times, reverse=True)
    start_BND = student[4] + (times[1] - 1.0) * student[5]
    assert torch.equal(start_BND, teacher[0][4])
    assert torch.equal(start_BND, learned[4])
    clips = task.prepare(batch(), SampleRng.of(0, 0))
    frames, rows, columns = clips.grid
    fine = flow_timesteps(4, tokens_per_frame=rows * columns, num_latent_frames=frames)
    assert times == [fine[0], fine[2], fine[3]]
    # The guided steps end at time 0. Each clip has the scales of its mode.
    latents_BND, (uncond2, uncond, cond) = teacher[3][4], (each[5] for each in teacher[3:])
    ends = []
    guidance = teacher_guidance(task._run)
    for index, mode in enumerate(clips.modes):
        scales = guidance_scales(guidance, mode=mode, timesteps=tuple(fine), num_latent_frames=frames)[3]
        image_N1 = torch.tensor(scales.image).repeat_interleave(latents_BND.shape[1] // len(scales.image))[:, None]
        of_image, of_text = uncond[index] - uncond2[index], cond[index] - uncond[index]
        ends.append(latents_BND[index] - fine[3] * (uncond2[index] + image_N1 * of_image + scales.text * of_text))
    wanted_BND = (start_BND - torch.stack(ends)) / fine[2]
    assert_close(loss.detach(), (learned[5].detach() - wanted_BND).square().mean(), tolerance=1e-4)
    assert loss.requires_grad
    loss.backward()
    gradients = {name for name, weight in task.module.named_parameters() if weight.grad is not None}
    assert gradients
    assert all(".lora_" in name for name in gradients)


def test_all_steps_are_drawn_and_repeat_after_a_resume(task):
    drawn = []
    for step in [*range(40), *range(40)]:
        task.begin_step(step)
        drawn.append(task._step)
    assert drawn[:40] == drawn[40:]
    assert set(drawn) == {0, 1}


@pytest.mark.slow
def test_the_file_states_its_sampling(tmp_path):
    train(settings_of(tmp_path, loop__steps=1))
    with safe_open(tmp_path / "lora" / "adapter_model.safetensors", "pt") as opened:
        stated = json.loads(opened.metadata()[METADATA_KEY])
    sampling = {"num_inference_steps": 2, "solver": "euler", "guidance_scale": 1.0, "image_guidance_scale": 1.0}
    assert stated == {"model": "demo", "sampling": sampling}
    video = load_preset("demo", prompt="raining, sea").replace({"loras": (str(tmp_path),)})
    assert asked_sampling(video)["sampling.num_inference_steps"].value == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora__rank": "none"}, "target=distill needs lora.rank: set it"),
        ({"train_mmdit__masked_loss": True}, "train_mmdit.masked_loss=true has no effect"),
        ({"train_distill__steps": 0}, "train_distill.steps=0 must be at least 1"),
        (
            {"train_distill__critic_steps": 3},
            r"train_distill.critic_steps=3 \(from test\) has no effect with target=distill",
        ),
    ],
)
def test_wrong_settings_are_refused(tmp_path, changes, message):
    with pytest.raises(RequestError, match=message):
        settings_of(tmp_path, **changes)


@pytest.mark.parametrize(("image", "modes", "evaluations"), [(2.0, {}, 6.5), (1.0, {}, 4.5), (2.0, {"t2v"}, 4.5)])
def test_the_predicted_evaluations_are_those_of_a_task(tmp_path, image, modes, evaluations):
    weights = {f"train_mmdit__mode_weights__{name}": 0 for name in CONDITION_MODES if modes and name not in modes}
    settings = settings_of(tmp_path, train_distill__image_guidance_scale=image, **weights)
    # Half a step of the student in the mean, and two steps of the teacher in each branch.
    assert find_objective(settings).evaluations(settings) == evaluations
    assert len(new_task(settings)._branches) * 2 + 0.5 == evaluations
