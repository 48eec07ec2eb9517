"""Sections of the settings of `osora generate`: prompt, video, references, picture, sampling and results."""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from pathlib import PurePath
from typing import Annotated

from pydantic import Field, model_validator

from opensora_cli.core.choices import Fit, MediaFormat, Solver
from opensora_cli.core.conditions import CONDITION_MODES, ReferenceLengths
from opensora_cli.core.formatting import either
from opensora_cli.core.section import (
    MAX_FRAMES,
    Count,
    FileName,
    Section,
    Share,
    SplitAt,
    Words,
    matching,
    one_of,
)
from opensora_cli.models.registry import ARCHITECTURES, FLUX1_DEV
from opensora_cli.settings.components import ModelSettings, VAESettings, settings_of

MAX_SEED = 2**62
_FLUX = ARCHITECTURES[FLUX1_DEV].files
_AT = re.compile(r"\s*(?P<at_s>\d+(\.\d*)?|\.\d+)\s*s\s*=(?P<prompt>.*\S.*)", re.DOTALL)
_OTHER_ENDINGS = frozenset(["apng", "avi", "bmp", "jpeg", "jpg", "m4v", "mkv", "mov", "mpeg", "mpg", "tiff", "webm"])
"""Endings that would otherwise become the name of a folder."""

NameFrom = StrEnum("NameFrom", ["SEED", "PROMPT"])
"""Name of results in a folder: `raining-sea_seed42`, or `raining, sea-0` as VBench expects."""


_Frames = Annotated[int, Field(ge=1, le=MAX_FRAMES)]
_Pixels = Annotated[int, Field(ge=1, le=16_384)]
_Steps = Annotated[int, Field(ge=1, le=1000)]
_Guidance = Annotated[float, Field(ge=0, le=100)]
_Resolution = Annotated[str, matching(r"[1-9]\d*px?", "must be a pixel count, as in 256px or 720p")]
_WIDE, _TALL = ("2.39:1", "2:1", "1.85:1", "16:9", "8:5", "3:2", "4:3"), ("3:4", "2:3", "5:8", "9:16", "1:1.85", "1:2")
_RATIOS = (*_WIDE, "1:1", *_TALL, "1:2.39")
_AspectRatio = Annotated[str, one_of(lambda: _RATIOS)]


class PromptAt(Section):
    """Prompt that holds from a time on."""

    at_s: float = Field(gt=0, le=10**6, description="Seconds from the beginning of the video.")
    prompt: Words = Field(min_length=1, description="Prompt from this time on.")

    @model_validator(mode="before")
    @classmethod
    def _read_typed(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        match = _AT.fullmatch(value)
        if match is None:
            raise ValueError(f"prompts_at={value} must be a time in seconds and a prompt, as in 2s=snow, sea")
        return {"at_s": match["at_s"], "prompt": match["prompt"].strip()}

    @property
    def shown(self) -> str:
        """Prompt in its typed form."""
        return f"{self.at_s:g}s={self.prompt}"


PromptsAt = Annotated[tuple[PromptAt, ...], SplitAt(";")]


class PromptSuffixSettings(Section):
    """Additions to a prompt, as in the captions of the training data."""

    motion_score: int | None = Field(
        4, ge=0, le=100, description="Amount of motion, or none. auto asks the server of --refine."
    )
    add_fps: bool = Field(True, description="Add the frames per second.")


class RefineSettings(Section):
    """Requests to a language model before a video is made."""

    prompt: bool = Field(False, description="Rewrite the prompt with the language model at OSORA_REFINE_URL.")
    motion_score: bool = Field(False, description="Choose prompt_suffix.motion_score, from 1 to 15.")
    original: Words | None = Field(None, description="Prompt before it was rewritten, set by that run.")

    @property
    def is_on(self) -> bool:
        """Whether the language model is asked."""
        return self.prompt or self.motion_score


class VideoSettings(Section):
    """Shape of the video."""

    resolution: _Resolution = Field("256px", description="Pixel count of a square, as in 768px.")
    aspect_ratio: _AspectRatio = Field("16:9", description="Width to height.")
    height: _Pixels | None = Field(None, description="Height in pixels, instead of resolution. Needs width.")
    width: _Pixels | None = Field(None, description="Width in pixels, instead of resolution. Needs height.")
    num_frames: _Frames = Field(129, description="Frames; 1: a picture.")
    picture_frames: _Frames = Field(
        1, description="Longest clip to sample for a picture, which is its first frame. At most max_frames."
    )
    fps: int = Field(24, ge=1, le=240, description="Frames per second.")
    resolutions: tuple[str, ...] = Field(("256px", "768px"), min_length=1, description="Resolutions of the model.")
    aspect_ratios: tuple[_AspectRatio, ...] = Field(_RATIOS, min_length=1, description="Aspect ratios of the model.")
    max_frames: _Frames = Field(129, description="Largest number of frames that the model supports.")
    extend: int = Field(0, ge=0, le=100, description="Segments after the first; each continues the one before.")
    causal_lengths: bool = Field(
        False, description="Count latent frames as a causal autoencoder does, and cut the video."
    )

    def rules(self) -> Iterator[str]:
        for name, other in (("height", "width"), ("width", "height")):
            if (value := getattr(self, name)) is not None and getattr(self, other) is None:
                yield f"video.{name}={value} must come with video.{other}: set both, or neither"


class DraftSettings(Section):
    """Smaller video that is made first. The video starts from it instead of noise."""

    resolution: _Resolution | None = Field(None, description="Make a draft of this pixel count first. None: no draft.")
    strength: float = Field(0.7, gt=0, lt=1, description="Start of sampling, from 1 (noise) to 0 (the draft).")


class ConditionSettings(Section):
    """References, and the frames of the video that they give."""

    mode: Annotated[str, one_of(lambda: CONDITION_MODES)] | None = Field(
        None, description=f"Frames that the references give: {', '.join(CONDITION_MODES)}. None: by the references."
    )
    # File names may have commas.
    references: Annotated[tuple[str, ...], SplitAt(";")] = Field((), description="Pictures or videos to start from.")
    continued: int | None = Field(
        None, ge=0, le=10**6, description="Frames of the reference that begin the result, set by --continue. 0: all."
    )
    fit: Fit = Field(Fit.CROP, description="How a reference of another shape is fitted to the video.")
    video_latent_frames: _Frames = Field(8, description="Latent frames of a v2v reference, after the first.")
    seamless: bool = Field(False, description="Drop the last frame of i2v_loop, which equals the first.")
    easy_latent_frames: _Frames = Field(16, description="Latent frames of an easy v2v reference, after the first.")

    @property
    def lengths(self) -> ReferenceLengths:
        """Latent frames of v2v references."""
        return ReferenceLengths(video=self.video_latent_frames, easy=self.easy_latent_frames)


class PictureFiles(Section):
    """Names of the picture model's weights. The text encoders are those of the video."""

    transformer: FileName = Field(_FLUX.transformer, description="Transformer weights.")
    vae: FileName = Field(_FLUX.vae, description="Autoencoder weights.")
    hub_repo: FileName = Field(_FLUX.hub_repo, description="Hub repository of both files.")


class PictureSettings(Section):
    """Picture that is made first, by default with flux1-dev. Steps, seed and guidance are those of `sampling`."""

    first: bool = Field(False, description="Make a picture first, and use it as the first frame.")
    save: bool = Field(False, description="Keep the picture beside the video as NAME.picture.png.")
    resolution: _Resolution = Field("768px", description="Pixel count, in the shape of the video or the nearest.")
    own_model: bool = Field(False, description="Make the picture with the video's model.")
    model: ModelSettings = Field(ModelSettings(), description="Name and sizes of the transformer.")
    vae: VAESettings = Field(VAESettings(), description="Autoencoder.")
    files: PictureFiles = Field(PictureFiles(), description="Names of the weights in the weights folder.")

    @model_validator(mode="before")
    @classmethod
    def _start_from_entry(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        model, vae, files = (dict(values.get(name) or {}) for name in ("model", "vae", "files"))
        name = str(model.get("name", FLUX1_DEV))
        # Validation reports an unknown name.
        entry = settings_of(name if name in ARCHITECTURES else FLUX1_DEV)
        if vae.get("kind", entry["vae"]["kind"]) != entry["vae"]["kind"]:
            entry["vae"] = {}
        names = {name: entry["files"][name] for name in ("transformer", "vae", "hub_repo")}
        return {**values, "model": entry["model"] | model, "vae": entry["vae"] | vae, "files": names | files}


class SamplingSettings(Section):
    """Sampling from noise to video."""

    num_inference_steps: _Steps = Field(50, description="Number of steps.")
    solver: Solver = Field(Solver.EULER, description="ODE solver: euler, ab2 (multistep) or heun (two evaluations).")
    fast: bool = Field(
        False,
        description="Unless they are set: solver=ab2, num_inference_steps=15, step_cache=0.15 and "
        "mean_guidance_of=the preset's steps.",
    )
    turbo: bool = Field(False, description="Use the few-step adapter of the model, and its sampling.")
    timesteps: tuple[Share, ...] | None = Field(None, description="Times from 1 (noise) to 0. None: by flow_shift.")
    stop_at: _Steps | None = Field(None, description="Stop after this many steps, to continue with --from.")
    guidance_scale: _Guidance = Field(7.5, description="Weight of the prompt; 1 disables guidance.")
    image_guidance_scale: _Guidance = Field(3.0, description="Weight of the reference; 1 disables guidance.")
    text_oscillation: bool = Field(True, description="Drop prompt guidance at odd steps from step 10 on.")
    image_oscillation: bool = Field(True, description="Drop reference guidance at odd steps from step 10 on.")
    mean_guidance_of: _Steps | None = Field(
        None, description="Mean of oscillating guidance over this many steps. None: no mean."
    )
    step_cache: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Reuse block outputs while the relative L2 change of the latents stays below this. 0: never.",
    )
    temporal_image_scaling: bool = Field(True, description="Increase reference guidance along i2v videos.")
    guidance_interval: tuple[Share, Share] = Field(
        (0.0, 1.0), description="Lowest and highest time of guided steps, from 0 (video) to 1 (noise)."
    )
    flow_shift: float | None = Field(
        None, ge=0.001, le=1000, description="Shift of timesteps. None: by the video's size."
    )
    seed: int = Field(42, ge=0, le=MAX_SEED, description="Seed of the noise. Sample i uses seed + i.")
    num_samples: int = Field(1, ge=1, le=10_000, description="Number of videos.")
    embedded_guidance: _Guidance = Field(4.0, description="Guidance input of a distilled model.")

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
        most = MAX_SEED - self.num_samples + 1
        if self.seed > most:
            yield (
                f"sampling.seed={self.seed} must leave room for the seeds of sampling.num_samples={self.num_samples}: "
                f"use at most {most}"
            )
        if self.stop_at is not None and self.stop_at >= self.num_inference_steps:
            yield (
                f"sampling.stop_at={self.stop_at} must be less than "
                f"sampling.num_inference_steps={self.num_inference_steps}: drop it, or use fewer"
            )
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


class OutputSettings(Section):
    """Files of results."""

    path: FileName = Field("samples", description="Folder, or file to write.")
    format: MediaFormat | None = Field(None, description="File format. None: by the file name, else mp4 or png.")
    name_from: NameFrom = Field(NameFrom.SEED, description="Names in a folder: by seed (sea_seed42) or prompt (sea-0).")
    overwrite: bool = Field(False, description="Replace existing files.")
    metadata: bool = Field(True, description="Write prompt, seed and settings into and beside the file.")
    last_frame: bool = Field(False, description="Keep the last frame of a video as NAME.last.png.")
    save_latents: bool = Field(True, description="Save latents before decoding and when a run is stopped.")
    save_state_every: Count | None = Field(None, description="Steps between saves of latents. None: on Ctrl-C.")
    preview_every: Count | None = Field(None, description="Steps between writes of NAME.preview.gif. None: never.")
    explore: bool = Field(False, description="Stop all samples early and make a contact sheet of them.")

    @property
    def named_format(self) -> MediaFormat | None:
        """Format that the ending of `path` names, or None for a folder."""
        return named_format(self.path)

    def rules(self) -> Iterator[str]:
        if self.named_format and self.format and self.named_format is not self.format:
            yield (
                f"output.format={self.format} must agree with the ending of output.path={self.path}: drop one of them"
            )
        if _ending(self.path) in _OTHER_ENDINGS:
            yield (
                f"output.path={self.path} must end in {either([f'.{known}' for known in MediaFormat])} to be a file: "
                "use one of these, or name a folder"
            )


def named_format(path: str) -> MediaFormat | None:
    """Return the format that the ending of a file names, or None for a folder."""
    return MediaFormat(_ending(path)) if _ending(path) in list(MediaFormat) else None


def _ending(path: str) -> str:
    return PurePath(path).suffix.lower().removeprefix(".")
