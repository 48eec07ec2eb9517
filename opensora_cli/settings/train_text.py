"""The two small text encoders that training can make."""

from typing import Self

from pydantic import Field, PositiveInt, model_validator

from opensora_cli.settings.base import Section


class TextTrainSettings(Section):
    """Sizes of the two small text encoders, trained together to read scenes out of captions, and then frozen."""

    batch_size: PositiveInt = Field(default=128, le=2**16, description="captions of a micro-batch")
    t5_width: PositiveInt = Field(default=128, le=2**16, description="width of T5")
    t5_layers: PositiveInt = Field(default=2, le=1000, description="layers of T5")
    t5_heads: PositiveInt = Field(default=4, le=2**16, description="attention heads of T5; divides its width")
    t5_max_length: PositiveInt = Field(default=32, le=2**16, description="tokens that T5 reads, its end included")
    clip_width: PositiveInt = Field(default=128, le=2**16, description="width of CLIP")
    clip_layers: PositiveInt = Field(default=2, le=1000, description="layers of CLIP")
    clip_heads: PositiveInt = Field(default=4, le=2**16, description="attention heads of CLIP; divides its width")
    clip_max_length: PositiveInt = Field(
        default=32, le=2**16, description="tokens that CLIP reads, its start and end included"
    )

    @model_validator(mode="after")
    def _heads_divide_widths(self) -> Self:
        for name, width, heads in (("t5", self.t5_width, self.t5_heads), ("clip", self.clip_width, self.clip_heads)):
            if width % heads:
                raise ValueError(f"text.{name}_heads={heads} must divide text.{name}_width={width}")
        return self
