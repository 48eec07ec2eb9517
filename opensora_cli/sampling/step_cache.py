"""Step cache: reuses block outputs of the transformer in steps whose latents have hardly changed.

If the latents are nearly those of an earlier evaluation, its outputs are added again (after Liu et al., "Timestep
Embedding Tells: It's Time to Cache for Video Diffusion Model", arXiv 2411.19108). The change is known beforehand: on
the straight path between data and noise of unit variance, from time u to t, it is |t - u|·√2/√((1-t)² + t²) of the norm
of the latents. So a plan knows the skipped evaluations, several ranks agree on them, and a paused run can continue.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from opensora_cli.sampling.guidance import Branch, GuidanceScales, branches_needed

Phase = tuple[Branch, ...]
"""Branches of a step. Steps with the same branches form a phase: with oscillating guidance, there are two, whose
latents are on two sides of one path."""

EXACT_FROM, EXACT_UNTIL = 0.85, 0.3
"""Times, 1 (noise) to 0 (data), before and after which every step is computed: early steps form the layout of the
video, and late steps its details."""


class CachedStep(NamedTuple):
    """Use of the cache in one step."""

    phase: Phase
    is_reused: bool
    """Whether the step reuses block outputs of the last step of its phase that computed them."""


def relative_change(t: float, since: float) -> float:
    """Return the change of the latents between two times, relative to their norm at `t`."""
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
    """Return the use of the cache in each step. Steps before `begun_at` are not available for reuse.

    A step reuses block outputs if the relative change of the latents is less than `largest_change` since the last step
    of its phase that computed them.
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
