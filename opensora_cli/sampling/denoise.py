"""The sampling loop: Euler steps along the velocity, from noise to data.

Nothing here knows the model. It is handed in as a function: generation, the samples of a training, the estimator on
fake tensors and the tests all run this loop. Gradients are not switched off here: callers do that.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from typing import Protocol

import torch

from opensora_cli.core.conditions import ConditionMode
from opensora_cli.sampling.guidance import (
    Branch,
    Guidance,
    GuidanceScales,
    branches_needed,
    combine_branches,
    guidance_scales_at,
)


class VelocityFn(Protocol):
    """Evaluates the model for some branches at one time, as a batch or one after the other."""

    def __call__(
        self, packed_latents_BND: torch.Tensor, t: float, branches: tuple[Branch, ...], /
    ) -> Mapping[Branch, torch.Tensor]:
        """Return velocity_BND of every one of `branches` at time `t`, 1 (noise) to 0 (data)."""


DistilledVelocityFn = Callable[[torch.Tensor, float], torch.Tensor]
"""`(packed_latents_BND, t) -> velocity_BND` of a guidance-distilled model."""

OnStep = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Called after each step with how many are done, their packed_latents_BND, from which the loop can go on, and the
velocity_BND of the last."""


def _ignore(steps: int, packed_latents_BND: torch.Tensor, velocity_BND: torch.Tensor) -> None:
    pass


def euler_step(latents_BND: torch.Tensor, velocity_BND: torch.Tensor, *, t: float, t_next: float) -> torch.Tensor:
    """Return the latents at `t_next`: latents + (t_next - t)·velocity, in the dtype of the latents.

    The velocity is noise - data at time `t`, 1 (noise) to 0 (data); towards data `t_next` is the lower one.
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
    steps_done: int = 0,
    stop_at: int | None = None,
    on_step: OnStep = _ignore,
) -> torch.Tensor:
    """Return the packed latents at the last of `timesteps`, guided by three branches.

    Only the branches that can change a step's result are computed; `count_evaluations` returns how many that will be.
    `packed_latents_BND` is noise, or what is there after `steps_done`, its tokens ordered by latent frame; they keep
    their dtype from step to step. With `stop_at`, those after so many steps are returned.
    `timesteps` fall and are one more than there are steps (fewer than two are a ValueError). `mode` is `t2v` for a clip
    with one latent frame.
    """
    scales = [
        guidance_scales_at(
            step,
            guidance,
            mode=mode,
            num_inference_steps=len(timesteps) - 1,
            num_latent_frames=num_latent_frames,
        )
        for step in range(len(timesteps) - 1)
    ]
    return denoise_with_scales(
        velocity,
        packed_latents_BND,
        timesteps=timesteps,
        scales=scales,
        steps_done=steps_done,
        stop_at=stop_at,
        on_step=on_step,
    )


def denoise_with_scales(
    velocity: VelocityFn,
    packed_latents_BND: torch.Tensor,
    *,
    timesteps: Sequence[float],
    scales: Sequence[GuidanceScales],
    steps_done: int = 0,
    stop_at: int | None = None,
    on_step: OnStep = _ignore,
) -> torch.Tensor:
    """Do what `denoise` does, with the scales of each step worked out: on fake tensors they cannot be."""

    def guided(step: int, latents_BND: torch.Tensor, t: float) -> torch.Tensor:
        return combine_branches(velocity(latents_BND, t, branches_needed(scales[step])), scales[step])

    return _euler(guided, packed_latents_BND, timesteps, (steps_done, stop_at), on_step)


def denoise_distilled(
    velocity: DistilledVelocityFn,
    packed_latents_BND: torch.Tensor,
    *,
    timesteps: Sequence[float],
    steps_done: int = 0,
    stop_at: int | None = None,
    on_step: OnStep = _ignore,
) -> torch.Tensor:
    """As `denoise`, for a model that has learned guidance as an input; one evaluation per step."""

    def at_step(_: int, latents_BND: torch.Tensor, t: float) -> torch.Tensor:
        return velocity(latents_BND, t)

    return _euler(at_step, packed_latents_BND, timesteps, (steps_done, stop_at), on_step)


def _euler(
    velocity: Callable[[int, torch.Tensor, float], torch.Tensor],
    packed_latents_BND: torch.Tensor,
    timesteps: Sequence[float],
    steps: tuple[int, int | None],
    on_step: OnStep,
) -> torch.Tensor:
    if len(timesteps) < 2:
        raise ValueError(f"sampling needs at least two timesteps, not {len(timesteps)}")
    latents_BND = packed_latents_BND
    for step, (t, t_next) in islice(enumerate(pairwise(timesteps)), *steps):
        velocity_BND = velocity(step, latents_BND, t)
        latents_BND = euler_step(latents_BND, velocity_BND, t=t, t_next=t_next)
        on_step(step + 1, latents_BND, velocity_BND)
        del velocity_BND  # not needed any more, while the next is evaluated
    return latents_BND
