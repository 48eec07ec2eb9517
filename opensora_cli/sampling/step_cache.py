"""A step cache: steps at which the transformer's blocks are not computed, since what goes into them has hardly changed.

What the blocks add to the tokens changes slowly from step to step. Where the latents are nearly those of an earlier
evaluation, that is added again (after Liu et al., "Timestep Embedding Tells: It's Time to Cache for Video Diffusion
Model", arXiv 2411.19108). How much the latents change is known beforehand: on the straight path between data and noise
of unit variance, from time u to t, it is |t - u|·√2/√((1-t)² + t²) of their norm, which is within a fifth of what was
measured on the demo. So a plan knows what is left out, several ranks agree on it, and a paused run can go on.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from opensora_cli.sampling.guidance import Branch, GuidanceScales, branches_needed

Phase = tuple[Branch, ...]
"""The branches of a step. Steps with the same ones make up a phase: where guidance oscillates, there are two, whose
latents lie on two sides of one path."""

EXACT_FROM, EXACT_UNTIL = 0.85, 0.3
"""Times, 1 (noise) to 0 (data), before and after which every step is computed: where the video is laid out, and where
its details are."""


class CachedStep(NamedTuple):
    """What a step does with a cache."""

    phase: Phase
    is_reused: bool
    """Whether it adds what the blocks have added at the last step of its phase that computed them."""


def relative_change(t: float, since: float) -> float:
    """Return how much the latents change between two times, of their norm at `t`."""
    return abs(t - since) * math.sqrt(2.0 / ((1.0 - t) ** 2 + t**2))


def one_of_each_phase(scales: Sequence[GuidanceScales]) -> tuple[GuidanceScales, ...]:
    """Return the scales of the first step of each phase."""
    first: dict[Phase, GuidanceScales] = {}
    for each in scales:
        first.setdefault(branches_needed(each), each)
    return tuple(first.values())


def cached_steps(
    scales: Sequence[GuidanceScales], timesteps: Sequence[float], *, largest_change: float, begun_at: int = 0
) -> tuple[CachedStep, ...]:
    """Return what each step does; all before `begun_at` are left out, and have computed nothing.

    A step is reused where the latents have changed by less than `largest_change` since the last one of its phase that
    was not.
    """
    computed: dict[Phase, float] = {}
    steps = []
    for step, (each, t) in enumerate(zip(scales, timesteps, strict=False)):
        phase = branches_needed(each)
        is_reused = (
            phase in computed and EXACT_UNTIL < t < EXACT_FROM and relative_change(t, computed[phase]) < largest_change
        )
        if step >= begun_at and not is_reused:
            computed[phase] = t
        steps.append(CachedStep(phase, is_reused))
    return tuple(steps)
