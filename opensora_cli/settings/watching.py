"""How a training run is watched: what is measured, validated and shown of it."""

from collections.abc import Iterator
from math import ceil
from typing import Annotated

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.settings.base import Section, Words
from opensora_cli.settings.data import DataSettings, SceneSettings
from opensora_cli.settings.files import parse_yaml_text

_Step = Annotated[PositiveInt, Field(le=10**9)]


class WatchingSettings(Section):
    """What is recorded beside log.jsonl, which every run has."""

    tensorboard: bool = Field(default=False, description="write the folder tensorboard, for `tensorboard --logdir`")
    profile_steps: tuple[_Step, _Step] | None = Field(
        default=None,
        description="first and last step of which torch.profiler writes a Chrome trace to the folder profile: 10,12",
    )
    exact_timers: bool = Field(
        default=False,
        description="synchronize with the GPU after each part of a step, so that its seconds are exact; this slows "
        "training down. Otherwise they are those that the host waited",
    )
    nvtx: bool = Field(default=False, description="mark the parts of each step for Nsight Systems; needs CUDA")
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        le=10**9,
        description="peak of one GPU, 1e12 operations a second, to compute the share that is used "
        "(MFU); none: the data sheet's, if the GPU is known",
    )

    def problems(self, *, device: str, steps: int) -> Iterator[str]:
        """Yield what contradicts the run, one line for each."""
        if self.nvtx and device == "cpu":
            yield "watching.nvtx=true marks the work of a GPU, and device=cpu: leave watching.nvtx out"
        if self.exact_timers and device == "cpu":
            yield "watching.exact_timers=true synchronizes with a GPU, and device=cpu: leave it out, a CPU's are exact"
        if self.profile_steps is not None:
            first, last = self.profile_steps
            if not first <= last <= steps:
                yield (
                    f"watching.profile_steps={first},{last} must be two steps of the run, the earlier one first: "
                    f"use 1,1 to {steps},{steps}"
                )


class ValidationSettings(Section):
    """The loss on clips that training never sees, with the same noise every time."""

    every: PositiveInt | None = Field(
        default=None,
        le=10**9,
        description="updates between two validations, and one before the first; none: no validation",
    )
    table: str | None = Field(
        default=None, min_length=1, description="table of held-out clips; procedural scenes have their own"
    )
    batches: PositiveInt = Field(default=8, le=100_000, description="micro-batches, or fewer if there are no more")
    seed: NonNegativeInt = Field(default=0, le=2**31, description="of the clips' order, and of their times and noises")

    def problems(self, data: DataSettings) -> Iterator[str]:
        """Yield what contradicts the data, one line for each."""
        if self.every is None:
            return
        if data.table is not None and self.table is None:
            yield f"validation.every={self.every} needs clips that are not trained on: name validation.table"
        if data.table is None and self.table is not None:
            yield (
                f"validation.table={self.table} goes with data.table: leave it out, "
                "procedural scenes are validated on scenes of their own"
            )
        if self.table is not None and self.table == data.table:
            yield f"validation.table={self.table} must be another table than data.table"

    def data(self, training: DataSettings) -> DataSettings:
        """Return the held-out clips: in the same shapes as the training's."""
        changes: dict[str, object] = {"table": self.table, "workers": 0}
        if training.table is None:
            changes |= {"scenes.held_out": True, "scenes.count": self._scenes(training.scenes)}
        return training.replace(changes)

    def _scenes(self, scenes: SceneSettings) -> int:
        """Return how many scenes fill the micro-batches, of clips and of single frames by their shares."""
        kinds = ((1 - scenes.picture_share, scenes.batch_size), (scenes.picture_share, scenes.picture_batch_size))
        enough = max(ceil(self.batches * size / share) for share, size in kinds if share > 0)
        return min(enough, scenes.count)


class SampleSettings(Section):
    """Videos of the model in training."""

    every: PositiveInt | None = Field(
        default=None,
        le=10**9,
        description="updates after which videos are made, for the folder samples; none: no videos",
    )
    prompts: tuple[Words, ...] = Field(
        default=(), max_length=64, description='a video is made of each: one prompt, or ["raining, sea", snow]'
    )
    num_frames: PositiveInt | None = Field(default=None, le=1025, description="none: that of the procedural scenes")
    height: PositiveInt | None = Field(default=None, le=4096, description="pixels; none: that of the procedural scenes")
    width: PositiveInt | None = Field(default=None, le=4096, description="pixels; none: that of the procedural scenes")
    fps: float | None = Field(
        default=None, gt=0, le=240, description="frames per second; none: that of the scenes, or data.fps_max"
    )
    num_inference_steps: PositiveInt = Field(default=20, le=1000, description="Euler steps from noise to video")
    guidance_scale: float = Field(
        default=7.5, ge=0, le=100, description="how strongly the prompt guides; 1: no guidance"
    )
    seed: NonNegativeInt = Field(default=0, le=2**31, description="of the first video's noise; the next has the next")

    @field_validator("prompts", mode="before")
    @classmethod
    def _read_prompts(cls, value: object) -> object:
        # Not cut at commas, which many prompts have.
        if not isinstance(value, str):
            return value
        if not value.lstrip().startswith("["):
            return (value,) if value.strip() else ()
        try:
            return parse_yaml_text(value)
        except yaml.YAMLError:
            raise ValueError(f'samples.prompts={value} must be a list, as in ["raining, sea", snow]') from None

    def shape(self, data: DataSettings) -> tuple[int, int, int] | None:
        """Return frames, height and width of a video; None where they are not known."""
        scenes = data.scenes
        defaults = (scenes.num_frames, scenes.size, scenes.size) if data.table is None else (None, None, None)
        frames, height, width = (
            given or default
            for given, default in zip((self.num_frames, self.height, self.width), defaults, strict=True)
        )
        return None if frames is None or height is None or width is None else (frames, height, width)

    def rate(self, data: DataSettings) -> float:
        """Return the frames per second."""
        return self.fps or (data.scenes.fps if data.table is None else data.fps_max)

    def problems(self, data: DataSettings, *, grid: LatentGrid, patch_size: int) -> Iterator[str]:
        """Yield what contradicts the data or the models, one line for each."""
        if self.every is None:
            return
        if not self.prompts:
            yield f"samples.every={self.every} needs something to show: give samples.prompts"
        shape = self.shape(data)
        if shape is None:
            yield (
                f"samples.every={self.every} needs a size with data.table={data.table}: "
                "give samples.num_frames, samples.height and samples.width"
            )
            return
        frames, *sides = shape
        if (below := grid.longest_clip(frames)) != frames:
            yield f"samples.num_frames={frames} does not suit vae.kind: use {below}"
        multiple = grid.spatial_compression_ratio * patch_size
        for name, side in zip(("height", "width"), sides, strict=True):
            if side % multiple:
                above = (side // multiple + 1) * multiple
                yield f"samples.{name}={side} must be a multiple of {multiple}, the side of a token: use {above}"
