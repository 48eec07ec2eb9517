"""Settings of how a video is sampled."""

from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, model_validator

from opensora_cli.core.solvers import Solver
from opensora_cli.settings.base import Section

MAX_SEED = 2**62

_Time = Annotated[float, Field(ge=0, le=1)]


class SamplingSettings(Section):
    """How the video is sampled."""

    num_inference_steps: int = Field(default=50, ge=1, le=1000, description="steps from noise to video")
    solver: Solver = Field(
        default=Solver.EULER,
        description="how a step gets on: euler as the reference does; ab2 also looks back at the step before; heun "
        "looks ahead, for twice the evaluations",
    )
    fast: bool = Field(
        default=False,
        description="sample in few evaluations: what is not set of sampling.solver, num_inference_steps, "
        "mean_guidance_of and step_cache is ab2, 15, the steps of the preset, and 0.15",
    )
    timesteps: tuple[_Time, ...] | None = Field(
        default=None,
        description="times between which the steps lead, from 1 (noise) down to 0 (video): 1,0.9,0.6,0; "
        "none: by flow_shift",
    )
    stop_at: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="steps after which to stop: what is predicted by then becomes the video, and the latents are "
        "saved, to go on from; none: at the end",
    )
    guidance_scale: float = Field(default=7.5, ge=0, le=100, description="weight of the prompt; 1 turns guidance off")
    image_guidance_scale: float = Field(
        default=3.0, ge=0, le=100, description="weight of the reference; 1 turns it off"
    )
    text_oscillation: bool = Field(default=True, description="drop the prompt guidance at odd steps from step 10 on")
    image_oscillation: bool = Field(default=True, description="likewise for the reference guidance")
    mean_guidance_of: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="steps of a run, to whose oscillating guidance each step takes the mean: nearly the same video "
        "with any number of steps; none: it oscillates",
    )
    step_cache: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="largest change of the latents, of their norm, since a step whose blocks' result is used again in "
        "place of computing them; 0: all are computed",
    )
    temporal_image_scaling: bool = Field(
        default=True, description="let the reference guidance grow along the video (i2v)"
    )
    guidance_interval: tuple[_Time, _Time] = Field(
        default=(0.0, 1.0),
        description="lowest and highest time, 0 (video) to 1 (noise), of the steps that are guided; others evaluate "
        "one branch",
    )
    flow_shift: float | None = Field(
        default=None, ge=0.001, le=1000, description="shift of the timesteps; none: from the video's size"
    )
    seed: int = Field(default=42, ge=0, le=MAX_SEED, description="seed of the noise; sample i takes seed + i")
    num_samples: int = Field(default=1, ge=1, le=10_000, description="videos to make")
    embedded_guidance: float = Field(default=4.0, ge=0, le=100, description="guidance input of a distilled model")

    @property
    def oscillates(self) -> bool:
        """Whether guidance depends on whether a step is odd or even, or is the mean of that."""
        return self.text_oscillation or self.image_oscillation

    @model_validator(mode="after")
    def _times_fit(self) -> Self:
        lowest, highest = self.guidance_interval
        if not 0 <= lowest < highest <= 1:
            raise ValueError(
                f"sampling.guidance_interval={lowest:g},{highest:g} must be two times from 0 (video) to 1 (noise), the "
                "lower one first: 0.2,0.9"
            )
        if self.mean_guidance_of is not None and not self.oscillates:
            raise ValueError(
                f"sampling.mean_guidance_of={self.mean_guidance_of} has no effect on guidance that does not oscillate: "
                "drop it, or set sampling.text_oscillation=true"
            )
        if self.step_cache and self.solver is Solver.HEUN:
            raise ValueError(f"sampling.step_cache={self.step_cache:g} does not go with sampling.solver=heun: use ab2")
        times = self.timesteps
        if times is None:
            return self
        if len(times) < 2 or (times[0], times[-1]) != (1.0, 0.0) or any(later >= t for t, later in pairwise(times)):
            shown = ",".join(f"{t:g}" for t in times)
            raise ValueError(f"sampling.timesteps={shown} must fall from 1 (noise) to 0 (video): 1,0.9,0.6,0")
        if self.flow_shift is not None:
            raise ValueError(f"sampling.flow_shift={self.flow_shift:g} has no effect on sampling.timesteps: drop one")
        if len(times) != self.num_inference_steps + 1:
            raise ValueError(
                f"sampling.timesteps has {len(times)} times, between which are {len(times) - 1} steps, and "
                f"sampling.num_inference_steps={self.num_inference_steps}: give --steps {len(times) - 1}, too"
            )
        return self
