"""Distillation of the demo to few steps: what is learned, what the adapter's file states, and exact resume."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_training
import torch
from closeness import assert_close
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_training import StopAfter
from torch import Tensor

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.batches import ClipBatch, SampleRng
from opensora_cli.engine.components.few_steps import METADATA_KEY, asked_sampling
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.early import Resume
from opensora_cli.engine.train.estimate import estimate_training, measure_training
from opensora_cli.engine.train.lora import CRITIC
from opensora_cli.engine.train.objectives import distill
from opensora_cli.engine.train.objectives.base import MODEL
from opensora_cli.engine.train.objectives.distill import DistillTask
from opensora_cli.engine.train.run import train
from opensora_cli.sampling.guidance import Branch
from opensora_cli.sampling.schedule import flow_timesteps
from opensora_cli.settings.explain import Given
from opensora_cli.settings.load import load_preset
from opensora_cli.settings.train import TrainSettings, load_train_settings

CAPTIONS = ("a red boat on the sea", "snowing, city")


def settings_of(output: Path, **changes: object) -> TrainSettings:
    """Return a small distillation of the demo; keys of `changes` have `__` for the dot."""
    given = {
        "output": str(output),
        "device": "cpu",
        "lora.rank": 4,
        "data.table": tiny_training.TABLE,
        "data.buckets": "{32px: {9: [1.0, 2]}}",
        "data.workers": 0,
        "train_mmdit.cache": "none",
        "train_mmdit.frozen_dtype": "float32",
        "train_mmdit.attention": "sdpa",
        "train_mmdit.video_latent_frames": 1,
        "train_mmdit.mode_weights.v2v_head_easy": 0,
        "train_mmdit.mode_weights.v2v_tail_easy": 0,
        "train_distill.steps": 2,
        "train_distill.teacher_steps": 4,
        "optimizer.learning_rate": 0.01,
        "optimizer.warmup_steps": 0,
        "loop.steps": 3,
        "loop.ema_decay": "none",
        "loop.log_every": 1,
        "precision.compute": "fp32",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    overrides = {key: Given(value, "test") for key, value in given.items()}
    return load_train_settings(config=Path("demo_distill"), overrides=overrides, environment={})


def new_task(settings: TrainSettings) -> DistillTask:
    return distill.build(
        settings,
        distribution=Distribution(torch.device("cpu")),
        clips=None,
        token_weights=None,
        reporter=SilentReporter(),
    )


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> DistillTask:
    """Return the task with random adapters; new ones change nothing."""
    made = new_task(settings_of(tmp_path_factory.mktemp("distill"), train_distill__image_guidance_scale=2.0))
    generator = torch.Generator().manual_seed(0)
    for name, weight in made.module.named_parameters():
        if ".lora_B." in name:
            weight.data.normal_(std=0.05, generator=generator)
    return made


def batch() -> ClipBatch:
    pixels = torch.randint(0, 256, (2, 9, 32, 32, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return ClipBatch(
        number=0,
        epoch=0,
        cached=None,
        paths=("a.mp4", "b.mp4"),
        captions=CAPTIONS,
        fps=(12.0, 12.0),
        motion_scores=(None, None),
        pixels_BTHWC=pixels,
    )


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
    evaluate = DistillTask._evaluate

    def recorded(self, clips, latents_BND, t, branch, **given):
        velocity_BND = evaluate(self, clips, latents_BND, t, branch, **given)
        layer = next(layer for layer in self.module.modules() if hasattr(layer, "base_layer"))
        part = "teacher" if layer._disable_adapters else layer._active_adapter[0]
        found.append(Evaluation(part, branch, t, torch.is_grad_enabled(), latents_BND, velocity_BND))
        return velocity_BND

    monkeypatch.setattr(DistillTask, "_evaluate", recorded)
    return found


def learned_by(task: DistillTask, loss: Tensor) -> set[str]:
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
    noise, student, *teacher, critic = evaluations
    # A step of the adapter from noise without a gradient, and the one that learns.
    assert [(each.part, each.branch, each.has_gradient) for each in (noise, student)] == [
        ("default", Branch.COND, False),
        ("default", Branch.COND, True),
    ]
    assert [(each.part, each.branch) for each in teacher] == [("teacher", branch) for branch in Branch]
    assert (critic.part, critic.branch) == ("critic", Branch.COND)
    clips = task._clips.prepare(batch(), SampleRng.of(0, 0))
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
    for index, mode in enumerate(clips.modes):
        scales = task._scales(mode, clips.grid, usual)[usual.index(critic.t)]
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


def test_only_the_critic_learns_between_steps_of_the_adapter(task, evaluations):
    roles = []
    for step in range(4):
        task.begin_step(step)
        roles.append([role for role, _, _ in task.losses(batch(), SampleRng.of(0, step))])
    assert roles == [[MODEL, CRITIC], [CRITIC]] * 2
    assert not any(each.has_gradient for each in evaluations if each.part == "teacher")


def test_all_steps_are_drawn_and_repeat_after_a_resume(task):
    drawn = []
    for step in [*range(40), *range(40)]:
        task.begin_step(step)
        drawn.append(task._step)
    assert drawn[:40] == drawn[40:]
    assert set(drawn) == {0, 1}


@pytest.mark.slow
def test_the_file_states_its_sampling_and_an_interrupted_run_ends_the_same(tmp_path):
    whole = settings_of(tmp_path / "whole")
    train(whole)
    file = tmp_path / "whole" / "lora" / "adapter_model.safetensors"
    with safe_open(file, "pt") as opened:
        stated = json.loads(opened.metadata()[METADATA_KEY])
    assert stated == {
        "model": "demo",
        "sampling": {
            "num_inference_steps": 2,
            "solver": "euler",
            "guidance_scale": 1.0,
            "image_guidance_scale": 1.0,
        },
    }
    video = load_preset("demo", prompt="raining, sea").replace({"loras": (str(tmp_path / "whole"),)})
    assert asked_sampling(video)["sampling.num_inference_steps"].value == 2
    parts = settings_of(tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        train(parts, reporter=StopAfter(2))
    train(parts, resume=Resume())
    expected = load_file(file)
    found = load_file(tmp_path / "parts" / "lora" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_clips_of_the_adapter_move_towards_the_teacher(tmp_path):
    learned = new_task(settings_of(tmp_path, train_distill__steps=1, lora__rank=16))
    optimizer = torch.optim.AdamW([*learned.trained(MODEL).values()], lr=5e-4)
    clips = learned._clips.prepare(batch(), SampleRng.of(0, 0))
    with torch.no_grad():
        before_BND = learned._student_data(clips)
    learned._matching_loss(clips, data_BND := before_BND.clone().requires_grad_(), SampleRng.of(0, 0)).backward()
    for _ in range(6):
        optimizer.zero_grad()
        loss, _ = learned.loss(batch(), SampleRng.of(0, 0))
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        moved_BND = learned._student_data(clips) - before_BND
    towards_BND = -data_BND.grad
    assert (moved_BND * towards_BND).sum() > 0.3 * moved_BND.norm() * towards_BND.norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora__rank": "none"}, "target=distill trains an adapter beside its teacher"),
        ({"train_mmdit__masked_loss": True}, "train_mmdit.masked_loss=true has no effect"),
        ({"train_distill__steps": 0}, "train_distill.steps=0 must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, changes, message):
    with pytest.raises(RequestError, match=message):
        settings_of(tmp_path, **changes)


def test_weights_of_tokens_are_refused(tmp_path):
    with pytest.raises(RequestError, match="token_weights does not go with target=distill"):
        train(settings_of(tmp_path), token_weights=lambda batch, grid: torch.ones(1, 1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("image", "modes", "branches"), [(2.0, {}, 3), (1.0, {}, 2), (2.0, {"t2v"}, 2)])
def test_the_predicted_evaluations_are_those_of_a_task(tmp_path, image, modes, branches):
    weights = {f"train_mmdit__mode_weights__{name}": 0 for name in CONDITION_MODES if modes and name not in modes}
    settings = settings_of(tmp_path, train_distill__image_guidance_scale=image, **weights)
    assert len(new_task(settings)._branches) == branches
    # Half a step of the adapter in the mean, and the one that learns. In every second update it is judged by all
    # branches of the teacher and by the critic, and its backward pass counts as one.
    assert settings.objective.evaluations(settings) == 0.5 + 1 + (branches + 1 + 1) / 2


def test_the_memory_of_both_adapters_is_estimated(tmp_path):
    settings = settings_of(tmp_path, train_distill__image_guidance_scale=2.0)
    expected, found = estimate_training(settings), measure_training(settings)
    assert expected.peak_bytes == pytest.approx(found.peak_bytes, rel=0.01)
    assert expected.most == found.most
