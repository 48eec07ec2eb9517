"""Settings of the video and its references: shape, draft, references and a first picture."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from opensora_cli.core.conditions import CONDITION_MODES, ReferenceLengths
from opensora_cli.core.media_choices import Fit
from opensora_cli.core.section import MAX_FRAMES, FileName, Section, SplitAt
from opensora_cli.models.registry import ARCHITECTURES, FLUX1_DEV
from opensora_cli.settings.components import ModelSettings, VAESettings, picture_values
from opensora_cli.settings.enums import AspectRatio, ReferenceRate
from opensora_cli.settings.explain import nearest

_FLUX = ARCHITECTURES[FLUX1_DEV].files
_RESOLUTION = re.compile(r"[1-9]\d*px?")
_Frames = Annotated[int, Field(ge=1, le=MAX_FRAMES)]
_Pixels = Annotated[int, Field(ge=1, le=16_384)]


class VideoSettings(Section):
    """Shape of the video."""

    resolution: str = Field(default="256px", description="Pixel count; 256px means 256 x 256 pixels.")
    aspect_ratio: AspectRatio = Field(default=AspectRatio.WIDE_16_9, description="Width to height.")
    height: _Pixels | None = Field(default=None, description="Height in pixels, instead of resolution. Needs width.")
    width: _Pixels | None = Field(default=None, description="Width in pixels, instead of resolution. Needs height.")
    num_frames: _Frames = Field(default=129, description="Number of frames; 1 makes a picture.")
    fps: int = Field(default=24, ge=1, le=240, description="Frames per second.")
    resolutions: tuple[str, ...] = Field(
        default=("256px", "768px"), min_length=1, description="Resolutions of the model."
    )
    aspect_ratios: tuple[AspectRatio, ...] = Field(
        default=tuple(AspectRatio), min_length=1, description="Aspect ratios of the model."
    )
    max_frames: _Frames = Field(default=129, description="Largest number of frames that the model supports.")
    extend: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Segments after the first. Each continues the last frames of the one before.",
    )
    causal_lengths: bool = Field(
        default=False,
        description="Count latent frames as a causal autoencoder does, and cut the decoded video to num_frames.",
    )

    @field_validator("resolution")
    @classmethod
    def _resolution_is_a_size(cls, value: str) -> str:
        if not _RESOLUTION.fullmatch(value):
            meant = f": did you mean {value}px?" if value.isdigit() else ""
            raise ValueError(f"video.resolution={value} must be a pixel count, as in 256px or 720p{meant}")
        return value

    def rules(self) -> Iterator[str]:
        for name, value, other in (("height", self.height, "width"), ("width", self.width, "height")):
            if value is not None and getattr(self, other) is None:
                yield f"video.{name}={value} must come with video.{other}: set both, or neither"


class DraftSettings(Section):
    """Smaller video that is made first. The video starts from it instead of noise."""

    resolution: str | None = Field(
        default=None, description="Make a draft of this pixel count first, and start from it. None means no draft."
    )
    strength: float = Field(
        default=0.7,
        gt=0,
        lt=1,
        description="Time at which sampling starts from the draft, from 1 (noise) to 0 (the draft).",
    )


class ConditionSettings(Section):
    """References, and the frames of the video that they give."""

    mode: str | None = Field(
        default=None,
        description=f"Frames that the references give: {', '.join(CONDITION_MODES)}. None means by the references.",
    )
    # File names may have commas.
    references: Annotated[tuple[str, ...], SplitAt(";")] = Field(
        default=(), description="Pictures or videos, separated by ;."
    )
    fit: Fit = Field(default=Fit.CROP, description="How a reference of another shape is fitted to the video.")
    ref_fps: ReferenceRate = Field(
        default=ReferenceRate.KEEP,
        description="For a reference video of another frame rate: keep its frames, or resample to match the rate.",
    )
    video_latent_frames: _Frames = Field(
        default=8, description="Latent frames of a v2v reference, besides the first one of a causal autoencoder."
    )
    seamless: bool = Field(default=False, description="Drop the last frame of i2v_loop, which equals the first.")
    easy_latent_frames: _Frames = Field(
        default=16, description="Latent frames of an easy v2v reference, besides the first one of a causal autoencoder."
    )

    @field_validator("mode")
    @classmethod
    def _mode_exists(cls, value: str | None) -> str | None:
        if value is not None and value not in CONDITION_MODES:
            close = nearest(value, CONDITION_MODES)
            raise ValueError(
                f"condition.mode={value} must be one of {', '.join(CONDITION_MODES)}"
                + (f": did you mean {close}?" if close else "")
            )
        return value

    @property
    def lengths(self) -> ReferenceLengths:
        """Latent frames of v2v references."""
        return ReferenceLengths(video=self.video_latent_frames, easy=self.easy_latent_frames)


class PictureFiles(Section):
    """Names of the picture model's weights. The text encoders are those of the video."""

    transformer: FileName = Field(default=_FLUX.transformer, description="Transformer weights.")
    vae: FileName = Field(default=_FLUX.vae, description="Autoencoder weights.")
    hub_repo: FileName = Field(default=_FLUX.hub_repo, description="Hub repository of both files.")


class PictureSettings(Section):
    """Picture that is made first, by default with flux1-dev. Steps, seed and guidance are those of `sampling`."""

    first: bool = Field(default=False, description="Make a picture first, and use it as the first frame.")
    save: bool = Field(default=False, description="Keep the picture beside the video as NAME.picture.png.")
    resolution: str = Field(default="768px", description="Pixel count, in the shape of the video or the nearest.")
    own_model: bool = Field(default=False, description="Make the picture with the video's model.")
    model: ModelSettings = Field(default=ModelSettings(), description="Name and sizes of the transformer.")
    vae: VAESettings = Field(default=VAESettings(), description="Autoencoder.")
    files: PictureFiles = Field(default=PictureFiles(), description="Names of the weights in the weights folder.")

    @model_validator(mode="before")
    @classmethod
    def _start_from_entry(cls, values: object) -> object:
        """Put the given fields over the entry of the picture's model."""
        return picture_values(values) if isinstance(values, Mapping) else values
