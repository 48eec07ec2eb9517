"""Settings of how a video is sampled."""

from typing import Final, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from opensora_cli.settings.base import Section

MAX_SEED = 2**62
AUTO: Final = "auto"
"""`sampling.batch_size` by what fits and is faster."""
_MOST_TOGETHER = 64


class SamplingSettings(Section):
    """How the video is sampled."""

    num_inference_steps: int = Field(default=50, ge=1, le=1000, description="Euler steps")
    stop_at: int | None = Field(
        default=None,
        ge=1,
        description="steps after which to stop: what is predicted by then becomes the video, and the latents are "
        "saved, to go on from; none: at the end",
    )
    guidance_scale: float = Field(default=7.5, ge=0, le=100, description="weight of the prompt; 1 turns guidance off")
    image_guidance_scale: float = Field(
        default=3.0, ge=0, le=100, description="weight of the reference; 1 turns it off"
    )
    text_oscillation: bool = Field(default=True, description="drop the prompt guidance at odd steps from step 10 on")
    image_oscillation: bool = Field(default=True, description="likewise for the reference guidance")
    temporal_image_scaling: bool = Field(
        default=True, description="let the reference guidance grow along the video (i2v)"
    )
    flow_shift: float | None = Field(
        default=None, gt=0, description="shift of the timesteps; none: from the video's size"
    )
    seed: int = Field(default=42, ge=0, le=MAX_SEED, description="seed of the noise; sample i takes seed + i")
    num_samples: int = Field(default=1, ge=1, le=10_000, description="videos to make")
    batch_size: int | Literal["auto"] = Field(
        default=1,
        description="videos of num_samples, and of the rows of --prompts, that are computed together; auto: as many as "
        "fit, and are faster than one at a time. With 1 the bits of a video depend on its own request alone, with more "
        "they differ by rounding",
    )
    embedded_guidance: float = Field(default=4.0, ge=0, le=100, description="guidance input of a distilled model")

    @field_validator("batch_size", mode="wrap")
    @classmethod
    def _batch_is_a_number_or_auto(cls, value: object, read: ValidatorFunctionWrapHandler) -> object:
        try:
            size = read(value)
        except ValidationError:
            size = 0
        if size != AUTO and not 1 <= size <= _MOST_TOGETHER:
            raise ValueError(f"sampling.batch_size={value} must be auto, or a number from 1 to {_MOST_TOGETHER}")
        return size
