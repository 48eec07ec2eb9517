"""Objective `distill`: an adapter that does in few steps without guidance what its model does in many with guidance.

The adapter takes its own steps from noise up to a random one. From there the model without the adapter, the teacher,
continues with guidance to the end of that step. The adapter learns to reach the same latents in one step. This is
progressive distillation (Salimans and Ho, arXiv 2202.00512) of a guided model (Meng et al., arXiv 2210.03142) on the
states that the student itself visits (Ross et al., arXiv 1011.0686), so that its errors do not add up.

One model in memory is teacher and student: the adapter is turned off for the teacher. Clips serve as captions and as
given frames alone.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from opensora_cli.core.conditions import CONDITION_MODES, T2V, ConditionMode
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import ClipBatch, SampleRng
from opensora_cli.engine.components.few_steps import sampling_metadata
from opensora_cli.engine.encode.clip_cache import ClipCache
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.lora import adapters_off, save_lora
from opensora_cli.engine.train.objectives import mmdit
from opensora_cli.engine.train.objectives.base import Task, TokenWeights
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

__all__ = ["build", "evaluations", "layer_values", "measured_steps", "outline", "stand_in"]


def build(
    settings: TrainSettings,
    *,
    distribution: Distribution,
    clips: ClipCache | None,
    token_weights: TokenWeights | None,
    reporter: Reporter,
) -> "DistillTask":
    """Return the task of the adapter, beside the frozen weights of its model."""
    clip_task = mmdit.build(settings, distribution=distribution, clips=clips, token_weights=None, reporter=reporter)
    return DistillTask(clip_task, settings)


def stand_in(settings: TrainSettings) -> "tuple[DistillTask, list[nn.Module]]":
    """Return the task and its frozen parts, without the weights of any file."""
    clip_task, frozen = mmdit.stand_in(settings)
    return DistillTask(clip_task, settings), frozen


def evaluations(settings: TrainSettings) -> float:
    """Return the mean number of evaluations of the adapter before its step, and of its teacher."""
    distill = settings.train_distill
    return (distill.steps - 1) / 2 + distill.teacher_steps * len(teacher_branches(settings))


def measured_steps(settings: TrainSettings) -> tuple[int, ...]:
    """Return the first two steps, which have the memory of all others: evaluations without gradients add none."""
    return (0, 1)


def teacher_branches(settings: TrainSettings) -> tuple[Branch, ...]:
    """Return the branches of guidance that the teacher evaluates for some condition mode of the run."""
    modes = [CONDITION_MODES[name] for name in settings.train_mmdit.mode_weights.by_mode()]
    scales = [
        each
        for mode in (T2V, *modes)
        for each in guidance_scales(_guidance(settings), mode=mode, timesteps=(1.0, 0.0), num_latent_frames=2)
    ]
    return tuple(branch for branch in Branch if any(branch in branches_needed(each) for each in scales))


def _guidance(settings: TrainSettings) -> Guidance:
    if settings.model.guidance_embed:
        return NO_GUIDANCE
    distill = settings.train_distill
    return Guidance(
        guidance_scale=distill.guidance_scale,
        image_guidance_scale=distill.image_guidance_scale,
        text_oscillation=distill.mean_guidance_of is not None,
        image_oscillation=distill.mean_guidance_of is not None,
        mean_of=distill.mean_guidance_of,
    )


class DistillTask(Task):
    """Training task of a few-step adapter.

    All ranks and micro-batches of an update train the same step of the adapter and evaluate the same branches of
    guidance, because ranks that share weights must evaluate equally often.

    Args:
        clips: task with the same module, which prepares micro-batches.
        settings: settings of the run.
    """

    def __init__(self, clips: MMDiTTask, settings: TrainSettings) -> None:
        super().__init__(clips.module)
        self._clips = clips
        self._run = settings
        self._settings = settings.train_distill
        self._step = 0
        self._branches = teacher_branches(settings)

    def begin_step(self, step: int) -> None:
        """Draw the step of the adapter that the update after `step` updates trains."""
        rng = np.random.default_rng((self._run.loop.seed, step))
        self._step = int(rng.integers(self._settings.steps))

    def loss(self, batch: ClipBatch, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean squared error of the adapter's velocity over one step, and no figures."""
        clips = self._clips.prepare(batch, rng)
        frames, rows, columns = clips.grid
        within = self._settings.teacher_steps
        times = flow_timesteps(self._settings.steps * within, tokens_per_frame=rows * columns, num_latent_frames=frames)
        first = self._step * within
        with torch.no_grad():
            start_BND = self._student(clips, times[: first + 1 : within])
            end_BND = self._teacher(clips, start_BND, times, range(first, first + within))
        t, t_next = times[first], times[first + within]
        velocity_BND = self._evaluate(clips, start_BND, t, Branch.COND)
        return nn.functional.mse_loss(velocity_BND.float(), (start_BND - end_BND) / (t - t_next)), {}

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

    def _student(self, clips: PreparedClips, times: Sequence[float]) -> Tensor:
        """Return the latents to which the adapter comes from noise in its steps between `times`."""
        latents_BND = clips.noise_BND
        for t, t_next in pairwise(times):
            velocity_BND = self._evaluate(clips, latents_BND, t, Branch.COND)
            latents_BND = euler_step(latents_BND, velocity_BND, t=t, t_next=t_next)
        return latents_BND

    def _teacher(self, clips: PreparedClips, latents_BND: Tensor, times: Sequence[float], steps: range) -> Tensor:
        """Return the latents to which the guided model comes in `steps` of those between `times`."""
        for step in steps:
            velocity_BND = self._guided(clips, latents_BND, times, step)
            latents_BND = euler_step(latents_BND, velocity_BND, t=times[step], t_next=times[step + 1])
        return latents_BND

    def _guided(self, clips: PreparedClips, latents_BND: Tensor, times: Sequence[float], step: int) -> Tensor:
        """Return the velocity of the guided model at the beginning of a step between `times`."""
        with adapters_off(self.module):
            found = {branch: self._evaluate(clips, latents_BND, times[step], branch) for branch in self._branches}
        guided = [
            combine_branches(
                {branch: each[index : index + 1] for branch, each in found.items()},
                self._scales(mode, clips.grid, times)[step],
            )
            for index, mode in enumerate(clips.modes)
        ]
        return torch.cat(guided)

    def _evaluate(
        self,
        clips: PreparedClips,
        latents_BND: Tensor,
        t: float,
        branch: Branch,
        *,
        forward: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        inputs, count = clips.inputs(), len(latents_BND)
        if not branch.uses_prompt:
            inputs["prompt_embeds_BLC"], inputs["pooled_prompt_embeds_BV"] = self._clips.empty_prompts(count)
        if not branch.uses_conditioning and clips.conditioning_BNK is not None:
            inputs["conditioning_BNK"] = torch.zeros_like(clips.conditioning_BNK)
        timesteps_B = torch.full((count,), t, device=latents_BND.device)
        velocity_BND: Tensor = (forward or self.forward)(latents_BND, timesteps_B=timesteps_B, **inputs)
        return velocity_BND

    def _scales(
        self, mode: ConditionMode, grid: tuple[int, int, int], times: Sequence[float]
    ) -> tuple[GuidanceScales, ...]:
        return guidance_scales(_guidance(self._run), mode=mode, timesteps=tuple(times), num_latent_frames=grid[0])
