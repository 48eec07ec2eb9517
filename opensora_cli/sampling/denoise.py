"""The sampling loops: Euler steps along the velocity, from noise to data.

Nothing here knows the model. It is handed in as a function, so that the loops run as well on a mock, on several devices
or with offloaded weights. Gradients are not switched off here: callers do that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from opensora_cli.core.conditions import ConditionMode
from opensora_cli.sampling.guidance import (
    Branch,
    Guidance,
    branches_needed,
    combine_branches,
    guidance_scales_at,
)


class VelocityFn(Protocol):
    """Evaluates the model for some branches at one time, together or one after the other."""

    def __call__(
        self, packed_latents_BND: torch.Tensor, t: float, branches: tuple[Branch, ...], /
    ) -> Mapping[Branch, torch.Tensor]:
        """Return velocity_BND of every one of `branches` at time `t`, 1 (noise) to 0 (data)."""


DistilledVelocityFn = Callable[[torch.Tensor, float], torch.Tensor]
"""`(packed_latents_BND, t) -> velocity_BND` of a guidance-distilled model."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What is known after a step."""

    step: int
    """Counted from 0."""
    num_inference_steps: int
    t_next: float
    """The time that was reached."""
    packed_latents: torch.Tensor
    """(B,N,D) at `t_next`. Not to be changed: the next step goes on from them."""
    velocity: torch.Tensor
    """(B,N,D), the guided velocity of the step."""

    def predicted_data(self) -> torch.Tensor:
        """Return where the velocity leads to at t = 0, packed: the model's present idea of the clip."""
        return euler_step(self.packed_latents, self.velocity, t=self.t_next, t_next=0.0)


StepCallback = Callable[[StepResult], None]
"""Called after every step, for progress and previews. An exception from it ends the run."""


def euler_step(latents_BND: torch.Tensor, velocity_BND: torch.Tensor, *, t: float, t_next: float) -> torch.Tensor:
    """Return the latents at `t_next`: latents + (t_next - t)·velocity, in the dtype of the latents.

    Args:
        latents_BND: at time `t`.
        velocity_BND: noise - data, at time `t`.
        t: 1 (noise) to 0 (data).
        t_next: the time to go to; lower than `t` towards data.
    """
    return latents_BND + (t_next - t) * velocity_BND.to(latents_BND.dtype)


def denoise(
    velocity: VelocityFn,
    packed_latents_BND: torch.Tensor,
    *,
    timesteps: Sequence[float],
    guidance: Guidance,
    mode: ConditionMode,
    num_latent_frames: int,
    on_step: StepCallback | None = None,
) -> torch.Tensor:
    """Return the packed latents at the last of `timesteps`, guided by three branches.

    Only the branches that can change a step's result are asked for; `count_evaluations` says how many that will be.

    Args:
        velocity: the model.
        packed_latents_BND: noise; tokens ordered by latent frame. They keep their dtype from step to step.
        timesteps: falling, one more than there are steps.
        guidance: scales and oscillations.
        mode: what is given; of a clip with one latent frame `t2v`.
        num_latent_frames: latent frames in the tokens.
        on_step: called after every step.

    Raises:
        ValueError: fewer than two timesteps.
    """
    num_inference_steps = _count_steps(timesteps)
    latents = packed_latents_BND
    for step, (t, t_next) in enumerate(pairwise(timesteps)):
        scales = guidance_scales_at(
            step,
            guidance,
            mode=mode,
            num_inference_steps=num_inference_steps,
            num_latent_frames=num_latent_frames,
        )
        guided = combine_branches(velocity(latents, t, branches_needed(scales)), scales)
        latents = euler_step(latents, guided, t=t, t_next=t_next)
        if on_step is not None:
            on_step(StepResult(step, num_inference_steps, t_next, latents, guided))
    return latents


def denoise_distilled(
    velocity: DistilledVelocityFn,
    packed_latents_BND: torch.Tensor,
    *,
    timesteps: Sequence[float],
    on_step: StepCallback | None = None,
) -> torch.Tensor:
    """Return the packed latents at the last of `timesteps`, from a model that has learned guidance as an input.

    One evaluation a step. The arguments are those of `denoise`.

    Raises:
        ValueError: fewer than two timesteps.
    """
    num_inference_steps = _count_steps(timesteps)
    latents = packed_latents_BND
    for step, (t, t_next) in enumerate(pairwise(timesteps)):
        predicted = velocity(latents, t)
        latents = euler_step(latents, predicted, t=t, t_next=t_next)
        if on_step is not None:
            on_step(StepResult(step, num_inference_steps, t_next, latents, predicted))
    return latents


def _count_steps(timesteps: Sequence[float]) -> int:
    if len(timesteps) < 2:
        raise ValueError(f"sampling needs at least two timesteps, not {len(timesteps)}")
    return len(timesteps) - 1
