"""Settings of logs, validation and samples of a training run."""

from typing import Annotated

import yaml
from pydantic import Field, field_validator

from opensora_cli.core.section import Count, FileName, Section, Words
from opensora_cli.settings.files import parse_yaml_text

_Seed = Annotated[int, Field(ge=0, le=2**31)]
_Pixels = Annotated[int, Field(ge=1, le=4096)]


class WatchingSettings(Section):
    """Records beside log.jsonl, which every run has."""

    tensorboard: bool = Field(default=False, description="Write the folder tensorboard for `tensorboard --logdir`.")
    profile_steps: tuple[Count, Count] | None = Field(
        default=None, description="First and last step of a torch.profiler trace, as in 10,12."
    )
    nvtx: bool = Field(default=False, description="Mark the parts of each step for Nsight Systems. Needs a GPU.")
    peak_tflops: float | None = Field(
        default=None, gt=0, le=10**9, description="Peak of a GPU in 1e12 operations a second, for the MFU."
    )


class ValidationSettings(Section):
    """Loss on held-out clips, with the same noise every time."""

    every: Count | None = Field(
        default=None, description="Updates between validations. One is before the first update. None disables them."
    )
    table: FileName | None = Field(default=None, description="Table of held-out clips.")
    batches: int = Field(default=8, ge=1, le=100_000, description="Largest number of micro-batches.")
    seed: _Seed = Field(default=0, description="Seed of the clips' order, times and noise.")


class SampleSettings(Section):
    """Videos of the model in training."""

    every: Count | None = Field(default=None, description="Updates between videos. None disables them.")
    prompts: tuple[Words, ...] = Field(
        default=(), max_length=64, description='One prompt, or a list as in ["raining, sea", snow].'
    )
    num_frames: int | None = Field(default=None, ge=1, le=1025, description="Number of frames.")
    height: _Pixels | None = Field(default=None, description="Height in pixels.")
    width: _Pixels | None = Field(default=None, description="Width in pixels.")
    fps: float | None = Field(default=None, gt=0, le=240, description="Frames per second. None means data.fps_max.")
    num_inference_steps: int = Field(default=20, ge=1, le=1000, description="Number of Euler steps.")
    guidance_scale: float = Field(default=7.5, ge=0, le=100, description="Guidance scale of the prompt. 1 disables it.")
    seed: _Seed = Field(default=0, description="Seed of the first video. Video i uses seed + i.")

    @field_validator("prompts", mode="before")
    @classmethod
    def _read_prompts(cls, value: object) -> object:
        # Prompts may have commas, so that text is not split there.
        if not isinstance(value, str):
            return value
        if not value.lstrip().startswith("["):
            return (value,) if value.strip() else ()
        try:
            return parse_yaml_text(value)
        except yaml.YAMLError:
            raise ValueError(f'samples.prompts={value} must be a list, as in ["raining, sea", snow]') from None
