"""Settings of what part of a video is given."""

from pydantic import Field, field_validator

from opensora_cli.core.conditions import CONDITION_MODES, ReferenceLengths
from opensora_cli.core.media_choices import Fit
from opensora_cli.settings.base import MAX_FRAMES, Section, split_list
from opensora_cli.settings.enums import ReferenceRate
from opensora_cli.settings.explain import nearest


class ConditionSettings(Section):
    """What part of the video is given."""

    mode: str | None = Field(
        default=None, description=f"{', '.join(CONDITION_MODES)}; none: t2v, or what suits the references"
    )
    references: tuple[str, ...] = Field(default=(), description="pictures or videos; as text, separated by ;")
    fit: Fit = Field(default=Fit.CROP, description="how a reference of another shape is fitted in")
    ref_fps: ReferenceRate = Field(
        default=ReferenceRate.KEEP,
        description="of a video at another rate: keep its frames as they are, or match the rate by resampling",
    )
    video_latent_frames: int = Field(
        default=8, ge=1, le=MAX_FRAMES, description="latent frames of a v2v reference, without the causal one"
    )
    seamless: bool = Field(
        default=False,
        description="leave out the last frame of i2v_loop, which repeats the first where it is played again",
    )
    easy_latent_frames: int = Field(default=16, ge=1, le=MAX_FRAMES, description="likewise for the easy v2v modes")

    @field_validator("references", mode="before")
    @classmethod
    def _split_files(cls, value: object) -> object:
        # The first to see the value (see Section): file names may have commas in them, so only ; separates.
        return split_list(value, separator=";") if isinstance(value, str) else value

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
        """Latent frames that the v2v modes give."""
        return ReferenceLengths(video=self.video_latent_frames, easy=self.easy_latent_frames)
