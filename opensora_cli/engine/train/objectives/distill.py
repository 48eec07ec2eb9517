"""Objective `distill`: an adapter that does in few steps without guidance what its model does in many with guidance.

The adapter takes its own steps from noise up to a random one. From there the model without the adapter, the teacher,
continues with guidance to the end of that step. The adapter learns to reach the same latents in one step. This is
progressive distillation (Salimans and Ho, arXiv 2202.00512) of a guided model (Meng et al., arXiv 2210.03142) on the
states that the student itself visits (Ross et al., arXiv 1011.0686), so that its errors do not add up.

One model in memory is teacher and student: the adapter is turned off for the teacher. Clips serve as captions and as
given frames alone.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from opensora_cli.core.conditions import CONDITION_MODES, T2V
from opensora_cli.data.batches import ClipBatch, SampleRng
from opensora_cli.engine.components.few_steps import sampling_metadata
from opensora_cli.engine.train.lora import using_adapter
from opensora_cli.engine.train.objectives.mmdit import MMDiTTask, PreparedClips
from opensora_cli.sampling.denoise import euler_step
from opensora_cli.sampling.guidance import (
    NO_GUIDANCE,
    Branch,
    Guidance,
    branches_needed,
    combine_branches,
    guidance_scales,
)
from opensora_cli.sampling.schedule import flow_timesteps
from opensora_cli.settings.train import TrainSettings


class DistillTask(MMDiTTask):
    """Training task of a few-step adapter.

    All ranks and micro-batches of an update train the same step of the adapter and evaluate the same branches of
    guidance, because ranks that share weights must evaluate equally often.
    """

    _step = 0

    @cached_property
    def _branches(self) -> tuple[Branch, ...]:
        return teacher_branches(self._run)

    @classmethod
    def evaluations(cls, settings: TrainSettings) -> float:
        """Return the mean number of evaluations of the adapter before its step, and of its teacher."""
        distill = settings.train_distill
        return (distill.steps - 1) / 2 + distill.teacher_steps * len(teacher_branches(settings))

    def begin_step(self, step: int) -> None:
        rng = np.random.default_rng((self._run.loop.seed, step))
        self._step = int(rng.integers(self._run.train_distill.steps))

    def loss(self, batch: ClipBatch, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        clips, times, first, start_BND = self._start(batch, rng)
        last, end_BND = first + self._run.train_distill.teacher_steps, start_BND
        with torch.no_grad():
            for step in range(first, last):
                velocity_BND = self._guided(clips, end_BND, times, step)
                end_BND = euler_step(end_BND, velocity_BND, t=times[step], t_next=times[step + 1])
        velocity_BND = self._evaluate(clips, start_BND, times[first], Branch.COND)
        target_BND = (start_BND - end_BND) / (times[first] - times[last])
        return nn.functional.mse_loss(velocity_BND.float(), target_BND), {}

    def adapter_metadata(self) -> dict[str, str]:
        """Return the steps of the adapter, and that it needs no guidance."""
        asked = {
            "num_inference_steps": self._run.train_distill.steps,
            "solver": "euler",
            "guidance_scale": 1.0,
            "image_guidance_scale": 1.0,
        }
        return sampling_metadata(self._run.model.name, asked)

    @torch.no_grad()
    def _start(self, batch: ClipBatch, rng: SampleRng) -> tuple[PreparedClips, Sequence[float], int, Tensor]:
        """Return clips, times of the teacher's steps, the first of the trained step, and the latents there."""
        clips, within = self.prepare(batch, rng), self._run.train_distill.teacher_steps
        frames, rows, columns = clips.grid
        steps = self._run.train_distill.steps * within
        times = flow_timesteps(steps, tokens_per_frame=rows * columns, num_latent_frames=frames)
        first, latents_BND = self._step * within, clips.noise_BND
        for t, t_next in pairwise(times[: first + 1 : within]):
            velocity_BND = self._evaluate(clips, latents_BND, t, Branch.COND)
            latents_BND = euler_step(latents_BND, velocity_BND, t=t, t_next=t_next)
        return clips, times, first, latents_BND

    def _guided(self, clips: PreparedClips, latents_BND: Tensor, times: Sequence[float], step: int) -> Tensor:
        """Return the velocity of the guided model at the beginning of a step between `times`."""
        with using_adapter(self.module, None):
            found = {branch: self._evaluate(clips, latents_BND, times[step], branch) for branch in self._branches}
        guided, guidance = [], teacher_guidance(self._run)
        for index, mode in enumerate(clips.modes):
            scales = guidance_scales(guidance, mode=mode, timesteps=tuple(times), num_latent_frames=clips.grid[0])
            own = {branch: each[index : index + 1] for branch, each in found.items()}
            guided.append(combine_branches(own, scales[step]))
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
        inputs, count, empty = dict(clips.inputs), len(latents_BND), self._empty_prompt
        if not branch.uses_prompt:
            inputs["prompt_embeds_BLC"] = self._placed(empty.prompt_embeds_LC).expand(count, -1, -1)
            inputs["pooled_prompt_embeds_BV"] = self._placed(empty.pooled_prompt_embeds_V).expand(count, -1)
        if not branch.uses_conditioning and (conditioning_BNK := inputs["conditioning_BNK"]) is not None:
            inputs["conditioning_BNK"] = torch.zeros_like(conditioning_BNK)
        timesteps_B = torch.full((count,), t, device=latents_BND.device)
        velocity_BND: Tensor = (forward or self.forward)(latents_BND, timesteps_B=timesteps_B, **inputs)
        return velocity_BND


def teacher_branches(settings: TrainSettings) -> tuple[Branch, ...]:
    """Return the branches of guidance that the teacher evaluates for some condition mode of the run."""
    modes = [CONDITION_MODES[name] for name in settings.train_mmdit.mode_weights.by_mode()]
    scales = [
        each
        for mode in (T2V, *modes)
        for each in guidance_scales(teacher_guidance(settings), mode=mode, timesteps=(1.0, 0.0), num_latent_frames=2)
    ]
    return tuple(branch for branch in Branch if any(branch in branches_needed(each) for each in scales))


def teacher_guidance(settings: TrainSettings) -> Guidance:
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


OBJECTIVE = DistillTask
