"""Settings of `osora train`: what is trained, on what, for how long, and where it is kept."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.base import ByteSize, Section
from opensora_cli.settings.components import ModelSettings, VAESettings
from opensora_cli.settings.enums import ConditionMode
from opensora_cli.settings.explain import Given
from opensora_cli.settings.files import read_yaml
from opensora_cli.settings.layers import Layer, read_environment, read_sections, validate
from opensora_cli.settings.presets import list_presets, preset_path


class TrainTarget(StrEnum):
    """Which part of the video model is trained."""

    VAE = "vae"
    TEXT = "text"
    MMDIT = "mmdit"


class OptimizerName(StrEnum):
    """How gradients become updates."""

    ADAMW = "adamw"
    MUON = "muon"


class ActivationOffload(StrEnum):
    """Which inputs of checkpointed blocks wait in host memory between forward and backward."""

    NONE = "none"
    ALL = "all"
    DYNAMIC = "dynamic"
    """Those that come when more than a share of the device's memory is in use."""


class SceneSettings(Section):
    """The clips of the procedural world."""

    size: int = Field(default=64, ge=32, le=1024, description="width and height in pixels")
    num_frames: PositiveInt = Field(default=17, description="frames of a clip: a multiple of 4, plus 1")
    fps: float = Field(default=12.0, gt=0, description="frames per second")


class OptimizerSettings(Section):
    """The optimizer and its learning rate: a linear warm-up, a plateau, and a linear way down to zero."""

    name: OptimizerName = Field(
        default=OptimizerName.ADAMW,
        description="muon orthogonalises the updates of matrices inside blocks, adamw does the rest; adamw does all",
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="of adamw, on the plateau")
    muon_learning_rate: float = Field(default=0.02, gt=0, description="of muon, on the plateau")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of adamw's mean gradient")
    beta2: float = Field(default=0.98, ge=0, lt=1, description="decay of adamw's mean squared gradient")
    eps: float = Field(default=1e-8, gt=0, description="added to the root of adamw's mean squared gradient")
    weight_decay: float = Field(default=0.0, ge=0, description="share of a weight that a step at rate 1 takes away")
    max_grad_norm: float = Field(default=1.0, gt=0, description="larger gradients are scaled down to this norm")
    warmup_steps: NonNegativeInt = Field(default=100, description="first steps, over which the rate rises")
    decay_steps: NonNegativeInt = Field(default=0, description="last steps, over which the rate falls to zero")


class LoopSettings(Section):
    """How long to train, and what to keep on the way."""

    steps: PositiveInt = Field(default=1000, description="steps in all")
    batch_size: PositiveInt = Field(default=8, description="clips or captions of a step")
    autocast_bf16: bool = Field(default=True, description="compute in bfloat16, with weights in float32")
    ema_decay: float = Field(default=0.999, ge=0, lt=1, description="of the averaged weights, which are exported")
    log_every: PositiveInt = Field(default=20, description="steps between two lines of the log")
    checkpoint_every: PositiveInt = Field(default=200, description="steps between two checkpoints")
    seed: NonNegativeInt = Field(default=0, description="of the first weights, and of every step's batch and noise")


class VAETrainSettings(Section):
    """The autoencoder's objective: mean absolute and squared error, and a little KL divergence."""

    picture_steps: NonNegativeInt = Field(default=0, description="first steps, on single frames instead of clips")
    picture_batch_size: PositiveInt = Field(default=32, description="pictures of such a step")
    squared_error_weight: float = Field(default=4.0, ge=0, description="of the squared error; the absolute one has 1")
    kl_weight: float = Field(default=1e-4, ge=0, description="of the mean divergence of one latent value, in nats")
    whitening_clips: PositiveInt = Field(
        default=64, description="clips from which the mean and variance of the exported latents are measured"
    )


class TextTrainSettings(Section):
    """Sizes of the two small text encoders, trained together to read scenes out of captions, and then frozen."""

    t5_width: PositiveInt = Field(default=128, description="width of T5")
    t5_layers: PositiveInt = Field(default=2, description="layers of T5")
    t5_heads: PositiveInt = Field(default=4, description="attention heads of T5; divides its width")
    t5_max_length: PositiveInt = Field(default=32, description="tokens that T5 reads, its end included")
    clip_width: PositiveInt = Field(default=128, description="width of CLIP")
    clip_layers: PositiveInt = Field(default=2, description="layers of CLIP")
    clip_heads: PositiveInt = Field(default=4, description="attention heads of CLIP; divides its width")
    clip_max_length: PositiveInt = Field(default=32, description="tokens that CLIP reads, its start and end included")

    @model_validator(mode="after")
    def _heads_divide_widths(self) -> Self:
        for name, width, heads in (("t5", self.t5_width, self.t5_heads), ("clip", self.clip_width, self.clip_heads)):
            if width % heads:
                raise ValueError(f"text.{name}_heads={heads} must divide text.{name}_width={width}")
        return self


class ModeWeights(Section):
    """How often each condition mode is trained, compared with the others."""

    t2v: float = Field(default=10.0, ge=0, description="nothing is given")
    i2v_head: float = Field(default=2.0, ge=0, description="the first frame is given")
    i2v_tail: float = Field(default=1.0, ge=0, description="the last frame is given")
    i2v_loop: float = Field(default=1.0, ge=0, description="both are given")
    v2v_head: float = Field(default=1.0, ge=0, description="the first frames are given")
    v2v_tail: float = Field(default=1.0, ge=0, description="the last frames are given")
    v2v_head_easy: float = Field(default=0.5, ge=0, description="more of the first frames are given")
    v2v_tail_easy: float = Field(default=0.5, ge=0, description="more of the last frames are given")

    def by_mode(self) -> dict[ConditionMode, float]:
        """Return the weights of the modes that are trained at all."""
        weights = {mode: float(getattr(self, mode)) for mode in ConditionMode}
        return {mode: weight for mode, weight in weights.items() if weight > 0}

    @model_validator(mode="after")
    def _some_mode_is_trained(self) -> Self:
        if not self.by_mode():
            raise ValueError("train_mmdit.mode_weights are all 0: give at least one mode a weight over 0")
        return self


class MMDiTTrainSettings(Section):
    """The transformer's objective: flow matching, conditioned by mode."""

    first_clips: PositiveInt = Field(default=512, description="clips that are encoded before the first step")
    cached_clips: PositiveInt = Field(
        default=4096, description="encoded clips kept in memory, for batches to draw from"
    )
    fresh_clips_per_step: NonNegativeInt = Field(default=2, description="new clips of a step, in place of the oldest")
    text_dropout: float = Field(default=0.1, ge=0, le=1, description="how often the prompt becomes the empty one")
    mode_weights: ModeWeights = ModeWeights()
    video_latent_frames: PositiveInt = Field(
        default=2, description="latent frames given in the v2v modes, without the causal one"
    )
    easy_latent_frames: PositiveInt = Field(default=3, description="likewise in the easy v2v modes")
    sigma_min: float = Field(default=1e-5, ge=0, lt=1, description="noise that is left at time 0")

    @model_validator(mode="after")
    def _first_clips_fit(self) -> Self:
        if self.first_clips > self.cached_clips:
            raise ValueError(
                f"train_mmdit.first_clips={self.first_clips} must be at most "
                f"train_mmdit.cached_clips={self.cached_clips}"
            )
        return self

    def given_latent_frames(self, mode: ConditionMode) -> int:
        """Return how many latent frames of a clip are given in `mode`."""
        if mode.takes_video:
            return (self.easy_latent_frames if mode.is_easy else self.video_latent_frames) + 1
        if mode.is_loop:
            return 2
        return int(mode.takes_reference)


class TrainMemorySettings(Section):
    """How training is made to fit into the memory of its device. Nothing here changes what is learnt."""

    checkpointing: bool = Field(
        default=False, description="compute blocks again in backward, instead of keeping what they computed"
    )
    checkpoint_double_blocks: NonNegativeInt | None = Field(
        default=None, description="how many double-stream blocks, from the first; none: all"
    )
    checkpoint_single_blocks: NonNegativeInt | None = Field(
        default=None, description="how many single-stream blocks, from the first; none: all"
    )
    activation_offload: ActivationOffload = Field(
        default=ActivationOffload.NONE,
        description="which inputs of these blocks wait in host memory, of use beside a GPU: all, or with dynamic those "
        "that come when its memory is nearly full",
    )
    offload_above: float | None = Field(
        default=None, ge=0, le=1, description="with dynamic: share of the memory from which on; none: 0.8"
    )
    activation_buffer: ByteSize | None = Field(
        default=None, description="size of the buffer that they wait in, as in 8GiB; none: what a step needs"
    )

    @model_validator(mode="after")
    def _everything_has_an_effect(self) -> Self:
        offload = self.activation_offload
        if not self.checkpointing:
            for name in ("checkpoint_double_blocks", "checkpoint_single_blocks"):
                if (count := getattr(self, name)) is not None:
                    raise ValueError(f"memory.{name}={count} has no effect without memory.checkpointing=true")
            if offload is not ActivationOffload.NONE:
                raise ValueError(f"memory.activation_offload={offload} has no effect without memory.checkpointing=true")
        if self.offload_above is not None and offload is not ActivationOffload.DYNAMIC:
            raise ValueError(
                f"memory.offload_above={self.offload_above} has no effect with memory.activation_offload={offload}: "
                "use dynamic"
            )
        if self.activation_buffer is not None and offload is ActivationOffload.NONE:
            raise ValueError(
                f"memory.activation_buffer={self.activation_buffer} has no effect with memory.activation_offload=none: "
                "use all or dynamic"
            )
        return self


class TrainSettings(Section):
    """Everything that a training run depends on."""

    target: TrainTarget = Field(description="the part that is trained")
    output: str = Field(
        default="runs/train", min_length=1, description="folder of checkpoint, log and exported weights"
    )
    weights: tuple[str, ...] = Field(
        default=(), description="folders to look for the frozen parts in: vae.safetensors, t5/ and clip/"
    )
    data: SceneSettings = SceneSettings()
    model: ModelSettings = ModelSettings()
    vae: VAESettings = VAESettings()
    text: TextTrainSettings = TextTrainSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    loop: LoopSettings = LoopSettings()
    train_vae: VAETrainSettings = VAETrainSettings()
    train_mmdit: MMDiTTrainSettings = MMDiTTrainSettings()
    memory: TrainMemorySettings = TrainMemorySettings()

    @property
    def num_latent_frames(self) -> int:
        """Latent frames of a clip."""
        return (self.data.num_frames - 1) // self.vae.time_compression_ratio + 1

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        problems = []
        if self.target in (TrainTarget.VAE, TrainTarget.MMDIT):
            problems += _clip_problems(self)
        if self.target is TrainTarget.MMDIT:
            problems += _transformer_problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self


_COMMON_SETTINGS = frozenset({"target", "output", "optimizer", "loop"})
_SETTINGS_OF_TARGET = {
    TrainTarget.VAE: _COMMON_SETTINGS | {"data", "vae", "train_vae"},
    TrainTarget.TEXT: _COMMON_SETTINGS | {"text"},
    TrainTarget.MMDIT: _COMMON_SETTINGS | {"weights", "data", "model", "vae", "text", "train_mmdit", "memory"},
}


def find_recipe(name: Path) -> Path:
    """Return the settings file that `name` means: itself, or the packaged recipe of that name.

    Raises:
        RequestError: it looks like a recipe's name, and there is none of that name.
    """
    return name if name.suffix or name.is_file() else preset_path("train", str(name))


def load_train_settings(*, config: Path | None, overrides: Layer, environment: Mapping[str, str]) -> TrainSettings:
    """Return the settings of a run: `overrides` above the environment above the file above the defaults.

    Args:
        config: YAML file, or the name of a packaged recipe. One is needed: no defaults would suit every target.
        overrides: what the command line gave; see `layers.collect_overrides`.
        environment: variables to read `OSORA_*` from; `OSORA_WEIGHTS`, the folder of the released model, is not meant
            for training and left alone.

    Raises:
        RequestError: no file is given, a key is unknown, a value breaks a rule, or an override has no effect.
        FileProblem: the file is missing or broken.
    """
    if config is None:
        raise RequestError("--config is missing: it names what to train", hint=f"use {_recipes()}, or your own file")
    path = find_recipe(config)
    file = read_sections(TrainSettings, read_yaml(path), source=str(path))
    ours = {name: value for name, value in environment.items() if name != "OSORA_WEIGHTS"}
    settings = validate(TrainSettings, {**file, **read_environment(TrainSettings, ours), **overrides})
    _refuse_without_effect(overrides, settings.target)
    return settings


def _recipes() -> str:
    return " or ".join(f"--config {name}" for name in list_presets("train"))


def _refuse_without_effect(overrides: Mapping[str, Given], target: TrainTarget) -> None:
    # In a file, which others may extend, such a key may stand; who types it expects something of it.
    for key, given in overrides.items():
        if key.partition(".")[0] not in _SETTINGS_OF_TARGET[target]:
            raise RequestError(
                f"{key}={given.value} (from {given.source}) has no effect with target={target}",
                hint=f"these have: {', '.join(sorted(_SETTINGS_OF_TARGET[target]))}",
            )


def _clip_problems(settings: TrainSettings) -> list[str]:
    data, vae = settings.data, settings.vae
    problems = []
    ratio = vae.time_compression_ratio
    if (data.num_frames - 1) % ratio:
        below = (data.num_frames - 1) // ratio * ratio + 1
        problems.append(
            f"data.num_frames={data.num_frames} must be a multiple of {ratio}, plus 1: use {below} or {below + ratio}"
        )
    multiple = vae.spatial_compression_ratio
    if settings.target is TrainTarget.MMDIT:
        multiple *= settings.model.patch_size
    if data.size % multiple:
        above = (data.size // multiple + 1) * multiple
        problems.append(f"data.size={data.size} must be a multiple of {multiple}, the side of a token: use {above}")
    return problems


def _transformer_problems(settings: TrainSettings) -> list[str]:
    model, vae = settings.model, settings.vae
    problems = []
    channels = vae.latent_channels * model.patch_size**2
    if model.in_channels != channels:
        problems.append(
            f"model.in_channels={model.in_channels} must be vae.latent_channels={vae.latent_channels} x "
            f"model.patch_size={model.patch_size} squared: use {channels}"
        )
    for kind, count, most in (
        ("double", settings.memory.checkpoint_double_blocks, model.depth),
        ("single", settings.memory.checkpoint_single_blocks, model.depth_single_blocks),
    ):
        if count is not None and count > most:
            problems.append(f"memory.checkpoint_{kind}_blocks={count} must be at most the model's: use 0 to {most}")
    if model.guidance_embed:
        problems.append("model.guidance_embed=true cannot be trained: distillation needs a teacher; use false")
    modes = settings.train_mmdit.mode_weights.by_mode()
    if not model.cond_embed and any(mode.takes_reference for mode in modes):
        problems.append("train_mmdit.mode_weights must be 0 but for t2v with model.cond_embed=false")
    most = max(settings.train_mmdit.given_latent_frames(mode) for mode in modes)
    if most >= settings.num_latent_frames:
        shortest = most * vae.time_compression_ratio + 1
        problems.append(
            f"data.num_frames={settings.data.num_frames} leaves nothing to learn in a condition mode that gives {most} "
            f"latent frames: use at least {shortest}, or 0 for such a mode in train_mmdit.mode_weights"
        )
    return problems
