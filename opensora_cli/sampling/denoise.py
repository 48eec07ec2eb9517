"""The sampling loop: steps along the velocity, from noise to data.

Nothing here knows the model. It is handed in as a function: generation, the samples of a training, the estimator on
fake tensors and the tests all run this loop. Gradients are not switched off here: callers do that.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from opensora_cli.core.solvers import Solver
from opensora_cli.sampling.guidance import Branch, GuidanceScales, branches_needed, combine_branches


class VelocityFn(Protocol):
    """Evaluates the model for some branches at one time, as a batch or one after the other."""

    def __call__(
        self, packed_latents_BND: torch.Tensor, t: float, branches: tuple[Branch, ...], /
    ) -> Mapping[Branch, torch.Tensor]:
        """Return velocity_BND of every one of `branches` at time `t`, 1 (noise) to 0 (data)."""


class Past(NamedTuple):
    """The latest evaluation of a branch."""

    t: float
    velocity_BND: torch.Tensor


NO_PAST: Mapping[Branch, Past] = MappingProxyType({})


class Step(NamedTuple):
    """What a step has left, from which the loop can go on."""

    steps_done: int
    packed_latents_BND: torch.Tensor
    velocity_BND: torch.Tensor
    """The guided one at the beginning of the step."""
    past: Mapping[Branch, Past] = NO_PAST
    """Of every branch that has been evaluated; of a solver that looks back."""


OnStep = Callable[[Step], None]
"""Called after each step."""


def _ignore(step: Step) -> None:
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
    scales: Sequence[GuidanceScales],
    solver: Solver = Solver.EULER,
    steps_done: int = 0,
    past: Mapping[Branch, Past] = NO_PAST,
    stop_at: int | None = None,
    on_step: OnStep = _ignore,
) -> torch.Tensor:
    """Return the packed latents at the last of `timesteps`, which fall.

    Only the branches that can change a step's result are computed; `count_evaluations` returns how many that will be.
    `packed_latents_BND` is noise, or what is there after `steps_done`, its tokens ordered by latent frame; they keep
    their dtype from step to step. `past` is what that step has left, without which a solver that looks back begins with
    an Euler step. With `stop_at`, the latents after so many steps are returned. `scales` (see `guidance_scales`) are
    one for each step, and there is at least one (ValueError).
    """
    if len(timesteps) < 2 or len(scales) != len(timesteps) - 1:
        raise ValueError(f"sampling needs a step, and scales for each: {len(timesteps)} times, {len(scales)} scales")
    latents_BND, seen = packed_latents_BND, dict(past)
    for step, (t, t_next) in islice(enumerate(pairwise(timesteps)), steps_done, stop_at):
        branches = branches_needed(scales[step])
        velocities = velocity(latents_BND, t, branches)
        guided_BND = slope_BND = combine_branches(velocities, scales[step])
        if solver is Solver.AB2:
            slope_BND = combine_branches(_half_a_step_on(velocities, seen, t=t, t_next=t_next), scales[step])
            seen |= {branch: Past(t, velocities[branch]) for branch in branches}
        elif solver.evaluations(is_last=step == len(scales) - 1) == 2:
            at_end = velocity(euler_step(latents_BND, guided_BND, t=t, t_next=t_next), t_next, branches)
            slope_BND = guided_BND.lerp(combine_branches(at_end, scales[step]), 0.5)
            del at_end
        latents_BND = euler_step(latents_BND, slope_BND, t=t, t_next=t_next)
        on_step(Step(step + 1, latents_BND, guided_BND, dict(seen)))
        del velocities, guided_BND, slope_BND  # not needed any more, while the next is evaluated
    return latents_BND


def _half_a_step_on(
    velocities: Mapping[Branch, torch.Tensor], past: Mapping[Branch, Past], *, t: float, t_next: float
) -> dict[Branch, torch.Tensor]:
    """Return velocities by the line through those at `t` and the past; a branch without one keeps its own.

    With steps of one length that is 3/2·now - 1/2·before (Hairer, Nørsett and Wanner, "Solving Ordinary Differential
    Equations I", III.1). Branch by branch, since where guidance oscillates their sum is another function at each step.
    """
    return {
        branch: velocity_BND
        if branch not in past
        else velocity_BND.lerp(past[branch].velocity_BND, (t_next - t) / 2 / (past[branch].t - t))
        for branch, velocity_BND in velocities.items()
    }


def last_times(
    scales: Sequence[GuidanceScales], timesteps: Sequence[float], *, begun_at: int, steps_done: int
) -> dict[Branch, float]:
    """Return when each branch was evaluated last in steps from `begun_at` to `steps_done`: the times of a `past`."""
    times: dict[Branch, float] = {}
    for each, t in islice(zip(scales, timesteps, strict=False), begun_at, steps_done):
        times |= dict.fromkeys(branches_needed(each), t)
    return times
