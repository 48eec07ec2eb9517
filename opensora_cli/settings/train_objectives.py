"""Settings of the objectives of transformer and autoencoder."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, create_model

from opensora_cli.core.conditions import CONDITION_MODES, ReferenceLengths
from opensora_cli.core.section import CountOrZero, FileName, Section, Share, Weight
from opensora_cli.models.registry import ARCHITECTURES, DEMO
from opensora_cli.settings.enums import AttentionChoice, DType

_DEMO = ARCHITECTURES[DEMO].files
_DEFAULT_WEIGHTS = {
    **{"t2v": 10.0, "i2v_head": 2.0, "i2v_tail": 1.0, "i2v_loop": 1.0, "v2v_head": 1.0, "v2v_tail": 1.0},
    **{"v2v_head_easy": 0.5, "v2v_tail_easy": 0.5},
}
"""Weights of condition modes. Other modes are not trained by default."""
_FIELDS: dict[str, Any] = {
    name: (Weight, Field(_DEFAULT_WEIGHTS.get(name, 0.0), description=mode.description))
    for name, mode in CONDITION_MODES.items()
}
_LatentFrames = Annotated[int, Field(ge=1, le=1025)]
_Size = Annotated[int, Field(ge=1, le=2**16)]


class ModeWeights(create_model("_ModeWeights", __base__=Section, **_FIELDS)):  # type: ignore[misc]
    """Relative frequency of each condition mode in training."""

    def by_mode(self) -> dict[str, float]:
        """Return the modes with a weight over 0, with their weights."""
        weights = {mode: float(getattr(self, mode)) for mode in type(self).model_fields}
        return {mode: weight for mode, weight in weights.items() if weight > 0}

    def rules(self) -> Iterator[str]:
        if not self.by_mode():
            yield "train_mmdit.mode_weights are all 0: give at least one mode a weight over 0"


class FrozenFileSettings(Section):
    """Names of the frozen parts in the folders of `weights`."""

    vae: FileName = Field(_DEMO.vae, description="Autoencoder weights.")
    t5: FileName = Field(_DEMO.t5, description="T5 folder in the transformers layout.")
    clip: FileName = Field(_DEMO.clip, description="CLIP folder in the transformers layout.")


class MMDiTTrainSettings(Section):
    """Objective of the transformer: flow matching with condition modes and text."""

    mode_weights: ModeWeights = ModeWeights()
    video_latent_frames: _LatentFrames = Field(8, description="Latent frames given in v2v, after the first.")
    easy_latent_frames: _LatentFrames = Field(16, description="Latent frames in easy v2v, after the first.")
    t5_dropout: Share = Field(0.3162, description="Share of captions that T5 reads as an empty prompt.")
    clip_dropout: Share = Field(0.3162, description="Share of captions that CLIP reads as an empty prompt.")
    add_fps: bool = Field(True, description="Add the frame rate of clips to captions.")
    add_motion_score: bool = Field(True, description="Add the motion score, if there is one, to captions.")
    embedded_guidance: float = Field(4.0, ge=0, le=100, description="Guidance input of a distilled model.")
    masked_loss: bool = Field(
        False, description="Omit given first and last frames from the loss, unless frames between them are given, too."
    )
    sigma_min: float = Field(1e-5, ge=0, lt=1, description="Noise that remains at time 0.")
    attention: AttentionChoice = Field(AttentionChoice.AUTO, description="Attention backend. auto: by device.")
    frozen_dtype: DType = Field(DType.AUTO, description="Type of frozen parts. auto: bfloat16 on GPUs.")
    files: FrozenFileSettings = FrozenFileSettings()
    cache: str | None = Field(
        None,
        description="Folder of encoded clips, as osora data cache makes it. Missing clips are encoded before the first "
        "step. None: encode random cuts.",
    )

    @property
    def lengths(self) -> ReferenceLengths:
        """Latent frames of v2v references."""
        return ReferenceLengths(video=self.video_latent_frames, easy=self.easy_latent_frames)


class DistillTrainSettings(Section):
    """Objective of a few-step adapter: steps without guidance that reach what guided steps of its model reach."""

    steps: int = Field(4, ge=1, le=16, description="Steps of the adapter.")
    teacher_steps: int = Field(8, ge=1, le=100, description="Guided steps of the model in each of them.")
    critic_steps: int = Field(2, ge=1, le=100, description="Updates of the critic for each of the adapter (dmd).")
    critic_learning_rate: float = Field(1e-3, gt=0, le=1, description="Peak learning rate of the critic (dmd).")
    guidance_scale: float = Field(7.5, ge=0, le=100, description="Weight of the prompt; 1 disables guidance.")
    image_guidance_scale: float = Field(3.0, ge=0, le=100, description="Weight of the reference; 1 disables guidance.")
    mean_guidance_of: int | None = Field(
        50, ge=1, le=1000, description="Use the mean of guidance that oscillates over this many steps. None: no mean."
    )


class DiscriminatorSettings(Section):
    """Discriminator between decoded and real clips, which the autoencoder learns to deceive."""

    weight: Weight = Field(0.0, description="Weight of the adversarial term. 0 disables it.")
    start_step: CountOrZero = Field(0, description="First steps without the discriminator.")
    learning_rate: float = Field(1e-4, gt=0, le=1, description="Peak learning rate of its adamw.")
    width: int = Field(64, ge=8, le=8192, multiple_of=8, description="Channels of the first layer.")
    layers: int = Field(3, ge=1, le=8, description="Layers that halve time, height and width.")


class VAETrainSettings(Section):
    """Objective of the autoencoder: mean absolute error and weighted terms."""

    decoder_only: bool = Field(False, description="Train the decoder alone, so that latents stay the same.")
    single_frame_share: Share = Field(0.0, description="Share of batches that are cut to single frames.")
    crop_size: int = Field(0, ge=0, le=2**16, description="Side of random square crops in pixels. 0: no crops.")
    squared_error_weight: Weight = Field(0.0, description="Weight of the mean squared error.")
    gradient_weight: Weight = Field(0.0, description="Weight of the absolute error of pixel gradients.")
    kl_weight: Weight = Field(0.0, description="Weight of the mean KL divergence of a latent value, in nats.")
    perceptual_weight: Weight = Field(0.0, description="Weight of the perceptual distance LPIPS.")
    perceptual_files: tuple[str, ...] = Field((), description="LPIPS weights: vgg16-397923af.pth and vgg.pth.")
    discriminator: DiscriminatorSettings = DiscriminatorSettings()
    export_half: bool = Field(False, description="Export float16 instead of float32.")


class TextTrainSettings(Section):
    """Lengths of captions."""

    t5_max_length: _Size = Field(32, description="Tokens that T5 reads, end token included.")
    clip_max_length: _Size = Field(32, description="Tokens that CLIP reads, start and end tokens included.")
