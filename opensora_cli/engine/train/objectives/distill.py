"""Objective `distill`: an adapter that makes in few steps, without guidance, the videos of its guided model.

The adapter, the student, takes its own steps from noise up to a random one, and predicts the clip there. The critic, a
second adapter, learns to denoise such clips. The teacher is the model without an adapter, with guidance. The difference
between a noisy clip denoised by the critic and by the teacher is the direction in which the student's clips become more
probable for the teacher. This is distribution matching (DMD2: Yin et al., arXiv 2405.14867) on the states that the
student itself visits (Self Forcing: Huang et al., arXiv 2506.08009).

One model in memory is teacher, student and critic. Clips serve as captions and as given frames alone.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opensora_cli.core.conditions import CONDITION_MODES, T2V, ConditionMode
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import ClipBatch, SampleRng
from opensora_cli.engine.components.few_steps import sampling_metadata
from opensora_cli.engine.encode.clip_cache import ClipCache
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.lora import CRITIC, adapters_off, critic_on, is_of_critic, save_lora
from opensora_cli.engine.train.objectives import mmdit
from opensora_cli.engine.train.objectives.base import MODEL, Losses, Role, Task, TokenWeights
from opensora_cli.engine.train.objectives.mmdit import MMDiTTask, PreparedClips, layer_values, outline
from opensora_cli.sampling.denoise import euler_step
from opensora_cli.sampling.guidance import (
    NO_GUIDANCE,
    Branch,
    Guidance,
    GuidanceScales,
    branches_needed,
    combine_branches,
    guidance_scales,
)
from opensora_cli.sampling.schedule import flow_timesteps
from opensora_cli.settings.train import LORA_FOLDER, TrainSettings

__all__ = ["build", "layer_values", "measured_steps", "outline", "stand_in"]

_LEAST_DISTANCE = 1e-3
"""Smallest distance from the teacher's clip by which a direction is divided."""


def build(
    settings: TrainSettings,
    *,
    distribution: Distribution,
    clips: ClipCache | None,
    token_weights: TokenWeights | None,
    reporter: Reporter,
) -> "DistillTask":
    """Return the task of both adapters, beside the frozen weights of their model."""
    clip_task = mmdit.build(settings, distribution=distribution, clips=clips, token_weights=None, reporter=reporter)
    return DistillTask(clip_task, settings)


def stand_in(settings: TrainSettings) -> "tuple[DistillTask, list[nn.Module]]":
    """Return the task and its frozen parts, without the weights of any file."""
    clip_task, frozen = mmdit.stand_in(settings)
    return DistillTask(clip_task, settings), frozen


def measured_steps(settings: TrainSettings) -> tuple[int, ...]:
    """Return the first step, in which both adapters learn, and the next such step."""
    return (0, settings.train_distill.critic_steps)


class DistillTask(Task):
    """Training task of a few-step adapter and its critic. The adapter learns in one of `critic_steps` updates.

    All ranks and micro-batches of an update train the same step of the adapter and evaluate the same branches of
    guidance, because ranks that share weights must evaluate equally often.

    Args:
        clips: task with the same module, which prepares micro-batches.
        settings: settings of the run.
    """

    def __init__(self, clips: MMDiTTask, settings: TrainSettings) -> None:
        rate, optimizer = settings.train_distill.critic_learning_rate, settings.optimizer
        ends = {key: min(rate, getattr(optimizer, key)) for key in ("initial_learning_rate", "final_learning_rate")}
        critic = Role(clips.module, optimizer.replace({"learning_rate": rate, **ends}), owns=is_of_critic)
        super().__init__(clips.module, roles={CRITIC: critic})
        self._clips = clips
        self._run = settings
        self._settings = settings.train_distill
        self._step = 0
        self._student_learns = True
        modes = [CONDITION_MODES[name] for name in settings.train_mmdit.mode_weights.by_mode()]
        every = [
            branches_needed(scales) for mode in (T2V, *modes) for scales in self._scales(mode, (2, 1, 1), (1.0, 0.0))
        ]
        self._branches = tuple(branch for branch in Branch if any(branch in needed for needed in every))

    def begin_step(self, step: int) -> None:
        """Draw the adapter's step that the update after `step` updates trains."""
        rng = np.random.default_rng((self._run.loop.seed, step))
        self._step = int(rng.integers(self._settings.steps))
        self._student_learns = step % self._settings.critic_steps == 0

    def loss(self, batch: ClipBatch, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the adapter, and no figures."""
        clips = self._clips.prepare(batch, rng)
        return self._matching_loss(clips, self._student_data(clips), rng), {}

    def losses(self, batch: ClipBatch, rng: SampleRng) -> Losses:
        """Yield the loss of the adapter, if it learns in this step, and that of the critic."""
        clips = self._clips.prepare(batch, rng)
        with torch.set_grad_enabled(self._student_learns):
            data_BND = self._student_data(clips)
        if self._student_learns:
            yield MODEL, self._matching_loss(clips, data_BND, rng), {}
        yield CRITIC, self._critic_loss(clips, data_BND.detach(), rng), {}

    def tokens(self, batch: ClipBatch) -> int:
        return self._clips.tokens(batch)

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the adapter, whose file states its steps and that it needs no guidance."""
        asked = {
            "num_inference_steps": self._settings.steps,
            "solver": "euler",
            "guidance_scale": 1.0,
            "image_guidance_scale": 1.0,
        }
        save_lora(
            folder / LORA_FOLDER,
            weights,
            config=self._clips.module.config,
            settings=self._run.lora,
            base=self._run.init,
            metadata=sampling_metadata(self._run.model.name, asked),
        )

    def _student_data(self, clips: PreparedClips) -> Tensor:
        """Return the clips that the adapter predicts in its step, (B,N,D), after its own steps from noise."""
        times = self._times(clips, self._settings.steps)
        latents_BND, t = clips.noise_BND, times[self._step]
        with torch.no_grad():
            for begin, end in pairwise(times[: self._step + 1]):
                velocity_BND = self._evaluate(clips, latents_BND, begin, Branch.COND)
                latents_BND = euler_step(latents_BND, velocity_BND, t=begin, t_next=end)
        return latents_BND - t * self._evaluate(clips, latents_BND, t, Branch.COND).float()

    def _matching_loss(self, clips: PreparedClips, data_BND: Tensor, rng: SampleRng) -> Tensor:
        """Return a loss whose gradient is the direction from the teacher to the critic.

        For each clip it is divided by the mean distance of the student's clip from that of the teacher.
        """
        with torch.no_grad():
            step, t, _, noisy_BND = self._noisy(clips, data_BND, rng)
            teacher_BND = self._teacher(clips, noisy_BND, step, t).float()
            direction_BND = t * (teacher_BND - self._critic(clips, noisy_BND, t).float())
            distance_B11 = (data_BND - noisy_BND + t * teacher_BND).abs().mean((1, 2), keepdim=True)
            target_BND = data_BND - direction_BND / distance_B11.clamp_min(_LEAST_DISTANCE)
        return 0.5 * nn.functional.mse_loss(data_BND, target_BND)

    def _critic_loss(self, clips: PreparedClips, data_BND: Tensor, rng: SampleRng) -> Tensor:
        """Return the mean squared error of the critic's velocity for noisy clips of the student."""
        _, t, noise_BND, noisy_BND = self._noisy(clips, data_BND, rng)
        return nn.functional.mse_loss(self._critic(clips, noisy_BND, t).float(), noise_BND - data_BND)

    def _noisy(self, clips: PreparedClips, data_BND: Tensor, rng: SampleRng) -> tuple[int, float, Tensor, Tensor]:
        """Return a random step of the teacher, its time, noise, and the clips with so much noise."""
        noise_BND = torch.randn(data_BND.shape, generator=rng.torch).to(data_BND)
        step = int(rng.numpy.integers(self._settings.teacher_steps))
        t = self._times(clips, self._settings.teacher_steps)[step]
        return step, t, noise_BND, torch.lerp(data_BND, noise_BND, t)

    def _teacher(self, clips: PreparedClips, latents_BND: Tensor, step: int, t: float) -> Tensor:
        """Return the guided velocity in a step of the teacher, which begins at `t`."""
        times = self._times(clips, self._settings.teacher_steps)
        with adapters_off(self.module):
            found = {branch: self._evaluate(clips, latents_BND, t, branch) for branch in self._branches}
        guided = [
            combine_branches(
                {branch: each[index : index + 1] for branch, each in found.items()},
                self._scales(mode, clips.grid, times)[step],
            )
            for index, mode in enumerate(clips.modes)
        ]
        return torch.cat(guided)

    def _critic(self, clips: PreparedClips, latents_BND: Tensor, t: float) -> Tensor:
        with critic_on(self.module):
            return self._evaluate(clips, latents_BND, t, Branch.COND, forward=self.roles[CRITIC].forward)

    def _evaluate(
        self,
        clips: PreparedClips,
        latents_BND: Tensor,
        t: float,
        branch: Branch,
        *,
        forward: Callable[..., Any] | None = None,
    ) -> Tensor:
        inputs, count = clips.inputs(), len(latents_BND)
        if not branch.uses_prompt:
            inputs["prompt_embeds_BLC"], inputs["pooled_prompt_embeds_BV"] = self._clips.empty_prompts(count)
        if not branch.uses_conditioning and clips.conditioning_BNK is not None:
            inputs["conditioning_BNK"] = torch.zeros_like(clips.conditioning_BNK)
        timesteps_B = torch.full((count,), t, device=latents_BND.device)
        velocity_BND: Tensor = (forward or self.forward)(latents_BND, timesteps_B=timesteps_B, **inputs)
        return velocity_BND

    @staticmethod
    def _times(clips: PreparedClips, steps: int) -> list[float]:
        frames, rows, columns = clips.grid
        return flow_timesteps(steps, tokens_per_frame=rows * columns, num_latent_frames=frames)

    def _scales(
        self, mode: ConditionMode, grid: tuple[int, int, int], times: Sequence[float]
    ) -> tuple[GuidanceScales, ...]:
        return guidance_scales(self._guidance, mode=mode, timesteps=tuple(times), num_latent_frames=grid[0])

    @property
    def _guidance(self) -> Guidance:
        if self._clips.module.config.guidance_embed:
            return NO_GUIDANCE
        return Guidance(
            guidance_scale=self._settings.guidance_scale,
            image_guidance_scale=self._settings.image_guidance_scale,
            mean_of=self._settings.teacher_steps,
        )
