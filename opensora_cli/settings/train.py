"""Settings of `osora train`: what is trained, on what, for how long, and where it is kept."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from opensora_cli.settings.base import Section
from opensora_cli.settings.components import ModelSettings, VAESettings
from opensora_cli.settings.explain import Given
from opensora_cli.settings.files import read_yaml
from opensora_cli.settings.layers import read_environment, read_sections, validate


class TrainTarget(StrEnum):
    """Which part of the video model is trained."""

    VAE = "vae"
    TEXT = "text"
    MMDIT = "mmdit"


class OptimizerName(StrEnum):
    """How gradients become updates."""

    ADAMW = "adamw"
    MUON = "muon"


class SceneSettings(Section):
    """The clips of the procedural world."""

    size: int = Field(64, ge=32, description="width and height in pixels")
    num_frames: PositiveInt = Field(17, description="frames of a clip, 4k+1")
    fps: float = Field(default=12.0, gt=0, description="frames per second")

    @model_validator(mode="after")
    def _whole_latent_frames(self) -> Self:
        if (self.num_frames - 1) % 4:
            below = (self.num_frames - 1) // 4 * 4 + 1
            raise ValueError(f"data.num_frames={self.num_frames} must be 4k+1: use {below} or {below + 4}")
        return self


class OptimizerSettings(Section):
    """The optimizer and its learning rate: a linear warm-up, a plateau, and a linear way down to zero."""

    name: OptimizerName = Field(
        OptimizerName.ADAMW,
        description="muon orthogonalises the updates of matrices inside blocks; adamw does the rest",
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="on the plateau, of adamw")
    muon_learning_rate: float = Field(default=0.02, gt=0, description="on the plateau, of muon")
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.98, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are scaled down to this norm")
    warmup_steps: NonNegativeInt = Field(100)
    decay_steps: NonNegativeInt = Field(0, description="last steps, over which the rate falls to zero")


class LoopSettings(Section):
    """How long to train, and what to keep on the way."""

    steps: PositiveInt = Field(1000, description="optimizer updates in all")
    batch_size: PositiveInt = Field(8, description="clips, pictures or captions of a step")
    autocast_bf16: bool = Field(True, description="compute in bfloat16, with weights in float32")
    ema_decay: float = Field(default=0.999, ge=0, lt=1, description="of the averaged weights, which are what is exported")
    log_every: PositiveInt = Field(20, description="steps between two lines of the log")
    checkpoint_every: PositiveInt = Field(200, description="steps between two checkpoints")
    seed: NonNegativeInt = Field(0)


class VAETrainSettings(Section):
    """The autoencoder's objective: mean absolute and squared error, and a little KL divergence."""

    picture_steps: NonNegativeInt = Field(0, description="first steps, on single frames instead of clips")
    picture_batch_size: PositiveInt = Field(32, description="pictures of such a step")
    squared_error_weight: float = Field(default=4.0, ge=0)
    kl_weight: float = Field(default=1e-4, ge=0, description="times the mean divergence of one latent value, in nats")


class TextTrainSettings(Section):
    """Sizes of the two small text encoders, trained together to read scenes out of captions, and then frozen."""

    t5_width: PositiveInt = Field(128)
    t5_layers: PositiveInt = Field(2)
    t5_heads: PositiveInt = Field(4)
    t5_max_length: PositiveInt = Field(32)
    clip_width: PositiveInt = Field(128)
    clip_layers: PositiveInt = Field(2)
    clip_heads: PositiveInt = Field(4)
    clip_max_length: PositiveInt = Field(32)


class MMDiTTrainSettings(Section):
    """The transformer's objective: flow matching, conditioned by mode."""

    first_clips: PositiveInt = Field(512, description="clips that are encoded before the first step")
    cached_clips: PositiveInt = Field(4096, description="encoded clips kept in memory, of which a batch is drawn")
    fresh_clips_per_step: NonNegativeInt = Field(2, description="cached clips that a step replaces by new ones")
    text_dropout: float = Field(default=0.1, ge=0, le=1, description="how often the prompt becomes the empty one")
    mode_weights: dict[str, float] = Field(
        {"t2v": 10, "i2v_head": 2, "i2v_tail": 1, "i2v_loop": 1, "v2v_head": 1, "v2v_tail": 1, "v2v_head_easy": 0.5}
        | {"v2v_tail_easy": 0.5},
        description="how often each condition mode is trained",
    )
    video_latent_frames: PositiveInt = Field(2, description="latent frames given by v2v modes, one more not counted")
    easy_latent_frames: PositiveInt = Field(3, description="the same of the easy ones")
    sigma_min: float = Field(default=1e-5, ge=0, lt=1, description="noise left at the data's end")


class TrainSettings(Section):
    """Everything that a training run depends on."""

    target: TrainTarget
    output: str = Field("runs/train", description="folder of checkpoints, log and the exported weights")
    weights: str = Field("", description="folder with the frozen parts: the autoencoder and the text encoders")
    data: SceneSettings = SceneSettings()
    model: ModelSettings = ModelSettings()
    vae: VAESettings = VAESettings()
    text: TextTrainSettings = TextTrainSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    loop: LoopSettings = LoopSettings()
    train_vae: VAETrainSettings = VAETrainSettings()
    train_mmdit: MMDiTTrainSettings = MMDiTTrainSettings()


def load_train_settings(
    *, config: Path, overrides: Mapping[str, Given], environment: Mapping[str, str]
) -> TrainSettings:
    """Return the settings of a run: `overrides` above the environment above the YAML file above the defaults.

    Raises:
        RequestError: a key is unknown, or a value breaks a rule; one line each.
        FileProblem: the file is missing or broken.
    """
    layers = read_sections(TrainSettings, read_yaml(config), source=str(config))
    return validate(TrainSettings, {**layers, **read_environment(TrainSettings, environment), **overrides})
