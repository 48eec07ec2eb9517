"""Classifier-free guidance with three branches, and the branches that a step needs.

With s_img and s_txt the image and text scales, the velocity is

    uncond2 + s_img·(uncond - uncond2) + s_txt·(cond - uncond)

after Brooks et al., "InstructPix2Pix" (arXiv 2211.09800, equation 3). The scales oscillate: from step 10 on, they are 1
at every odd step, or the mean of both values. A branch that cancels out of the sum is not computed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import torch

from opensora_cli.core.choices import Solver
from opensora_cli.core.conditions import ConditionMode

OSCILLATION_START = 10
"""First step from which odd steps may be unguided."""


class Branch(StrEnum):
    """Inputs of the model in one evaluation. `combine_branches` needs this order."""

    UNCOND2 = "uncond2"
    """Negative prompt, and conditioning with all zeros, including the mask."""
    UNCOND = "uncond"
    """Negative prompt and conditioning."""
    COND = "cond"
    """Prompt and conditioning."""

    @property
    def uses_prompt(self) -> bool:
        """Whether the model gets the prompt instead of the negative prompt."""
        return self is Branch.COND

    @property
    def uses_conditioning(self) -> bool:
        """Whether the model gets the given frames instead of zeros."""
        return self is not Branch.UNCOND2


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """Guidance by the prompt and the references. The defaults are those of the released presets."""

    guidance_scale: float = 7.5
    image_guidance_scale: float = 3.0
    text_oscillation: bool = True
    image_oscillation: bool = True
    temporal_image_scaling: bool = True
    """Whether image guidance grows along the clip, from 1 at the first frame, in modes that give pictures."""
    mean_of: int | None = None
    """Number of steps of a run with oscillation; each step here uses the mean of its oscillation. None means that
    scales oscillate with the steps."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest time, 0 (data) to 1 (noise), of the guided steps (Kynkäänniemi et al.,
    "Applying Guidance in a Limited Interval", arXiv 2404.07724)."""


NO_GUIDANCE = Guidance(guidance_scale=1.0, image_guidance_scale=1.0)
"""Guidance with only the branch of the prompt, also for models with guidance as an input."""


@dataclass(frozen=True, slots=True)
class GuidanceScales:
    """Scales of one step."""

    text: float
    image: tuple[float, ...]
    """Image scale for all latent frames, or one for each."""


UNGUIDED = GuidanceScales(1.0, (1.0,))


def oscillating_scale(scale: float, step: int) -> float:
    """Return `scale`, or 1 at odd steps from `OSCILLATION_START` on. Steps count from 0."""
    return 1.0 if step >= OSCILLATION_START and step % 2 else scale


def mean_scale(scale: float, step: int, *, num_steps: int, mean_of: int) -> float:
    """Return the mean of `oscillating_scale` over two neighboring steps in a run of `mean_of` steps, at the same
    progress as `step` in a run of `num_steps`: oscillation in short steps has the effect of this mean.
    """
    return (scale + 1.0) / 2 if step * mean_of >= OSCILLATION_START * num_steps else scale


@cache
def guidance_scales(
    guidance: Guidance, *, mode: ConditionMode, timesteps: tuple[float, ...], num_latent_frames: int
) -> tuple[GuidanceScales, ...]:
    """Return the scales of each step between `timesteps`.

    Without a reference in `mode`, the image scale is 1 because both unconditional branches have the same inputs.
    """
    # The last frame's scale falls to 1 over the run. Along the clip, scales grow from 1 to the last frame's scale.
    falling = _even(guidance.image_guidance_scale, 1.0, len(timesteps))

    def oscillating(scale: float, step: int) -> float:
        if guidance.mean_of is None:
            return oscillating_scale(scale, step)
        return mean_scale(scale, step, num_steps=len(timesteps) - 1, mean_of=guidance.mean_of)

    def scales_of(step: int, t: float, last: float) -> GuidanceScales:
        lowest, highest = guidance.interval
        if not lowest <= min(t, 1.0) <= highest:  # rounded, the first time may be over 1
            return UNGUIDED
        text, image = guidance.guidance_scale, guidance.image_guidance_scale
        if guidance.text_oscillation:
            text = oscillating(text, step)
        if not mode.needs_reference:
            return GuidanceScales(text, (1.0,))
        if guidance.image_oscillation:
            image, last = oscillating(image, step), oscillating(last, step)
        if guidance.temporal_image_scaling and mode.gives_pictures and image > 1.0:
            return GuidanceScales(text, _even(1.0, last, num_latent_frames))
        return GuidanceScales(text, (image,))

    return tuple(scales_of(step, t, last) for step, (t, last) in enumerate(zip(timesteps[:-1], falling, strict=False)))


def _even(first: float, last: float, count: int) -> tuple[float, ...]:
    # In fp32 like the reference; one by one, which outlines of tensors allow, too.
    return tuple(float(each) for each in torch.linspace(first, last, count, device="cpu"))


def _telescope(scales: GuidanceScales) -> list[tuple[Branch, tuple[float, ...]]]:
    """Return the branches that count, each with the weight of its difference to the previous one: 1, s_img and s_txt.

    The coefficient of a branch is its weight minus the weight of the next one. If these are equal for all frames, the
    branch drops out, and the sum over the others keeps its form.
    """
    ladder = [(Branch.UNCOND2, (1.0,)), (Branch.UNCOND, scales.image), (Branch.COND, (scales.text,))]
    following = [*(weights for _, weights in ladder[1:]), (0.0,)]
    return [
        (branch, weights)
        for (branch, weights), after in zip(ladder, following, strict=True)
        if set(weights) != set(after)
    ]


def branches_needed(scales: GuidanceScales) -> tuple[Branch, ...]:
    """Return the branches that can change the velocity of a step with these scales, in the order of `Branch`."""
    return tuple(branch for branch, _ in _telescope(scales))


def busiest(scales: Sequence[GuidanceScales]) -> GuidanceScales:
    """Return the scales of a step that evaluates the most branches."""
    return max(scales, key=lambda each: len(branches_needed(each)))


def combine_branches(velocities: Mapping[Branch, torch.Tensor], scales: GuidanceScales) -> torch.Tensor:
    """Return the guided velocity_BND from at least the branches in `branches_needed(scales)`.

    Differences are computed before scaling, so that low precision loses as little as in the formula above. Tokens are
    in the order of latent frames. Raises ValueError if they do not divide into the frames of the scales.
    """
    (first, _), *others = _telescope(scales)
    # Branches that drop out before the first one have the same weight, and the weights begin with 1.
    guided = before = velocities[first]
    for branch, weights in others:
        guided = guided + _for_tokens(weights, velocities[branch]) * (velocities[branch] - before)
        before = velocities[branch]
    return guided


def _for_tokens(weights: tuple[float, ...], velocity_BND: torch.Tensor) -> torch.Tensor | float:
    if len(weights) == 1:
        return weights[0]
    tokens_per_frame, rest = divmod(velocity_BND.shape[1], len(weights))
    if rest:
        raise ValueError(f"{velocity_BND.shape[1]} tokens do not divide into {len(weights)} latent frames")
    # Fill on the device because copying numbers from the host would wait for a GPU.
    return torch.cat([velocity_BND.new_full((tokens_per_frame,), weight) for weight in weights])[None, :, None]


def count_evaluations(
    scales: Sequence[GuidanceScales],
    *,
    solver: Solver = Solver.EULER,
    reused: Collection[int] = (),
    steps_done: int = 0,
    ranks: int = 1,
) -> int:
    """Return the number of evaluations in steps with these scales: 80 (t2v) or 110 (i2v) with the 50 steps of the
    presets.

    Only steps after `steps_done` count, without the steps that a step cache has `reused`. If several `ranks` share the
    branches, the result is that of the rank with the most.
    """
    return sum(
        -(-len(branches_needed(each)) // ranks) * solver.evaluations(is_last=step == len(scales) - 1)
        for step, each in enumerate(scales)
        if step >= steps_done and step not in reused
    )
