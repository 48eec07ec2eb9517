"""Settings of sampling."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from opensora_cli.core.section import Section, Share
from opensora_cli.core.solvers import Solver

MAX_SEED = 2**62

_Steps = Annotated[int, Field(ge=1, le=1000)]
_Guidance = Annotated[float, Field(ge=0, le=100)]


class SamplingSettings(Section):
    """Sampling from noise to video."""

    num_inference_steps: _Steps = Field(default=50, description="Number of steps.")
    solver: Solver = Field(
        default=Solver.EULER,
        description="ODE solver: euler (reference), ab2 (uses the previous step) or heun (two evaluations a step).",
    )
    fast: bool = Field(
        default=False,
        description="Unless they are set: solver=ab2, num_inference_steps=15, step_cache=0.15 and "
        "mean_guidance_of=the preset's steps.",
    )
    timesteps: tuple[Share, ...] | None = Field(
        default=None, description="Times between the steps, from 1 (noise) to 0 (video). None means by flow_shift."
    )
    stop_at: _Steps | None = Field(
        default=None,
        description="Stop after this many steps and write NAME_stepN; --from continues. None means the last step.",
    )
    guidance_scale: _Guidance = Field(default=7.5, description="Weight of the prompt; 1 disables guidance.")
    image_guidance_scale: _Guidance = Field(default=3.0, description="Weight of the reference; 1 disables guidance.")
    text_oscillation: bool = Field(default=True, description="Drop prompt guidance at odd steps from step 10 on.")
    image_oscillation: bool = Field(default=True, description="Drop reference guidance at odd steps from step 10 on.")
    mean_guidance_of: _Steps | None = Field(
        default=None,
        description="Use the mean of guidance that oscillates over this many steps. None means oscillating guidance.",
    )
    step_cache: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Reuse block outputs while the relative L2 change of the latents stays below this. 0: never.",
    )
    temporal_image_scaling: bool = Field(default=True, description="Increase reference guidance along i2v videos.")
    guidance_interval: tuple[Share, Share] = Field(
        default=(0.0, 1.0), description="Lowest and highest time, from 0 (video) to 1 (noise), of guided steps."
    )
    flow_shift: float | None = Field(
        default=None, ge=0.001, le=1000, description="Shift of the timesteps. None means by the size of the video."
    )
    seed: int = Field(default=42, ge=0, le=MAX_SEED, description="Seed of the noise. Sample i uses seed + i.")
    num_samples: int = Field(default=1, ge=1, le=10_000, description="Number of videos.")
    embedded_guidance: _Guidance = Field(default=4.0, description="Guidance input of a distilled model.")

    @property
    def oscillates(self) -> bool:
        """Whether guidance oscillates, or is the mean of oscillating guidance."""
        return self.text_oscillation or self.image_oscillation

    def rules(self) -> Iterator[str]:
        lowest, highest = self.guidance_interval
        if lowest >= highest:
            yield (
                f"sampling.guidance_interval={lowest:g},{highest:g} must be two times from 0 (video) to 1 (noise), the "
                "lower one first: 0.2,0.9"
            )
        if self.step_cache and self.solver is Solver.HEUN:
            yield f"sampling.step_cache={self.step_cache:g} does not go with sampling.solver=heun: use ab2"
        times = self.timesteps
        if times is None:
            return
        if len(times) < 2 or (times[0], times[-1]) != (1.0, 0.0) or any(later >= t for t, later in pairwise(times)):
            shown = ",".join(f"{t:g}" for t in times)
            yield f"sampling.timesteps={shown} must fall from 1 (noise) to 0 (video): 1,0.9,0.6,0"
        elif len(times) != self.num_inference_steps + 1:
            yield (
                f"sampling.timesteps has {len(times)} times, between which are {len(times) - 1} steps, and "
                f"sampling.num_inference_steps={self.num_inference_steps}: give --steps {len(times) - 1}, too"
            )
