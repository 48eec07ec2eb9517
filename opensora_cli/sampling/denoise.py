"""Sampling loop: steps along the velocity, from noise to data.

The loop gets the model as a function and does not depend on it. Generation, samples during training, the estimator on
fake tensors and the tests all run this loop. Callers must switch off gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from opensora_cli.core.choices import Solver
from opensora_cli.sampling.guidance import Branch, GuidanceScales, branches_needed, combine_branches
from opensora_cli.sampling.step_cache import CachedStep, Phase


class VelocityFn(Protocol):
    """Function that evaluates the model for some branches at one time, as a batch or one after the other."""

    def __call__(
        self,
        packed_latents_BND: torch.Tensor,
        t: float,
        branches: tuple[Branch, ...],
        /,
        cached: CachedStep | None = None,
    ) -> Mapping[Branch, torch.Tensor]:
        """Return velocity_BND of each of `branches` at time `t`, 1 (noise) to 0 (data).

        With `cached`, block outputs are stored for later steps of the phase, or reused from an earlier step.
        """


class Past(NamedTuple):
    """State for later steps: the latest velocity of a branch, or the latents that a phase of a cache evaluated last."""

    t: float
    value_BND: torch.Tensor


NO_PAST: Mapping[Branch | Phase, Past] = MappingProxyType({})


class Step(NamedTuple):
    """State after a step, from which the loop can continue."""

    steps_done: int
    packed_latents_BND: torch.Tensor
    velocity_BND: torch.Tensor
    """Guided velocity at the beginning of the step."""
    past: Mapping[Branch | Phase, Past] = NO_PAST
    """State of every evaluated branch, for a multistep solver, and of every phase, with a step cache."""


OnStep = Callable[[Step], None]
"""Callback after each step."""


def euler_step(latents_BND: torch.Tensor, velocity_BND: torch.Tensor, *, t: float, t_next: float) -> torch.Tensor:
    """Return the latents at `t_next`: latents + (t_next - t)·velocity, in the dtype of the latents.

    The velocity is noise - data at time `t`, 1 (noise) to 0 (data). Towards data, `t_next` is lower than `t`.
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
    cache: Sequence[CachedStep] | None = None,
    past: Mapping[Branch | Phase, Past] = NO_PAST,
    stop_at: int | None = None,
    on_step: OnStep = lambda step: None,
) -> torch.Tensor:
    """Return the packed latents at the last of `timesteps`, which decrease.

    Only branches that can change a step's result are computed; `count_evaluations` returns their number.
    `packed_latents_BND` is noise, or the latents after `steps_done`, with tokens in the order of latent frames. The
    dtype stays constant. `past` is the state of that step; without it, a multistep solver begins with an Euler step.
    With `stop_at`, the latents after that number of steps are returned. `scales` (see `guidance_scales`) and `cache`
    (see `cached_steps`) have an entry per step. Raises ValueError without a step, or if the lengths do not match.
    """
    if len(timesteps) < 2 or len(scales) != len(timesteps) - 1:
        raise ValueError(f"sampling needs a step, and scales for each: {len(timesteps)} times, {len(scales)} scales")
    latents_BND, seen = packed_latents_BND, dict(past)
    if cache is not None:
        for phase, at in past.items():
            if isinstance(phase, tuple):
                velocity(at.value_BND, at.t, phase, cached=CachedStep(phase, is_reused=False))
    for step, (t, t_next) in islice(enumerate(pairwise(timesteps)), steps_done, stop_at):
        branches = branches_needed(scales[step])
        if cache is None:
            velocities = velocity(latents_BND, t, branches)
        else:
            velocities = velocity(latents_BND, t, branches, cached=cache[step])
            if not cache[step].is_reused:
                seen[branches] = Past(t, latents_BND)
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
        del velocities, guided_BND, slope_BND  # free their memory for the next evaluation
    return latents_BND


def _half_a_step_on(
    velocities: Mapping[Branch, torch.Tensor], past: Mapping[Branch | Phase, Past], *, t: float, t_next: float
) -> dict[Branch, torch.Tensor]:
    """Return velocities half a step ahead, by linear extrapolation; a branch without a past keeps its velocity.

    With equal steps the result is 3/2·now - 1/2·before (Hairer, Nørsett and Wanner, "Solving Ordinary Differential
    Equations I", III.1). Branches are extrapolated separately because oscillating guidance changes their sum.
    """
    return {
        branch: velocity_BND
        if branch not in past
        else velocity_BND.lerp(past[branch].value_BND, (t_next - t) / 2 / (past[branch].t - t))
        for branch, velocity_BND in velocities.items()
    }


def last_times(
    scales: Sequence[GuidanceScales],
    timesteps: Sequence[float],
    *,
    solver: Solver,
    cache: Sequence[CachedStep] | None = None,
    begun_at: int,
    steps_done: int,
) -> dict[Branch | Phase, float]:
    """Return the times of `past` after the steps from `begun_at` to `steps_done`: of branches, then of phases."""
    branches: dict[Branch, float] = {}
    phases: dict[Branch | Phase, float] = {}
    for step in range(begun_at, steps_done):
        if solver is Solver.AB2:
            branches |= dict.fromkeys(branches_needed(scales[step]), timesteps[step])
        if cache is not None and not cache[step].is_reused:
            phases[cache[step].phase] = timesteps[step]
    return {branch: branches[branch] for branch in Branch if branch in branches} | phases
