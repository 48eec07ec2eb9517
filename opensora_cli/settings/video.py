"""Settings of the shape of a video."""

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from opensora_cli.settings.base import MAX_FRAMES, Section
from opensora_cli.settings.enums import AspectRatio

_RESOLUTION = re.compile(r"[1-9]\d*px?")


class VideoSettings(Section):
    """Shape of the video."""

    resolution: str = Field(default="256px", description="pixel count: 256px is 256 x 256 pixels")
    aspect_ratio: AspectRatio = Field(default=AspectRatio.WIDE_16_9, description="width to height")
    height: int | None = Field(
        default=None, ge=1, le=16_384, description="pixels; wins over resolution, and needs width"
    )
    width: int | None = Field(
        default=None, ge=1, le=16_384, description="pixels; wins over resolution, and needs height"
    )
    num_frames: int = Field(default=129, ge=1, le=MAX_FRAMES, description="frames; 1 makes a picture")
    fps: int = Field(default=24, ge=1, le=240, description="frames per second")
    resolutions: tuple[str, ...] = Field(
        default=("256px", "768px"), min_length=1, description="resolutions the model has"
    )
    aspect_ratios: tuple[AspectRatio, ...] = Field(
        default=tuple(AspectRatio), min_length=1, description="aspect ratios the model has"
    )
    max_frames: int = Field(default=129, ge=1, le=MAX_FRAMES, description="most frames the model has")
    extend: int = Field(
        default=0,
        ge=0,
        le=100,
        description="segments that are made after the first, each from the last frames of the one before, as v2v_head "
        "gives them; num_frames is the length of each, those frames included",
    )
    causal_lengths: bool = Field(
        default=False,
        description="count latent frames as if the autoencoder were causal, (num_frames - 1) // 4 + 1, as the "
        "reference's published preset of high compression does: a video may then have any length, to which it is cut",
    )

    @field_validator("resolution")
    @classmethod
    def _resolution_is_a_size(cls, value: str) -> str:
        if not _RESOLUTION.fullmatch(value):
            meant = f": did you mean {value}px?" if value.isdigit() else ""
            raise ValueError(f"video.resolution={value} must be a pixel count, as in 256px or 720p{meant}")
        return value

    @model_validator(mode="after")
    def _height_with_width(self) -> Self:
        if self.height is not None and self.width is None:
            raise ValueError(f"video.height={self.height} must come with video.width: set both, or neither")
        if self.width is not None and self.height is None:
            raise ValueError(f"video.width={self.width} must come with video.height: set both, or neither")
        return self


class DraftSettings(Section):
    """A smaller video that is made first, from which the video starts in place of noise."""

    resolution: str | None = Field(
        default=None, description="its pixel count, less than the video's, in the video's shape; none: no draft is made"
    )
    strength: float = Field(
        default=0.7,
        gt=0,
        lt=1,
        description="time, from 1 (noise) to 0 (data), at which the video starts from its draft, to the nearest step: "
        "the lower, the closer to the draft, and the fewer steps",
    )
