"""The objectives of the transformer, the autoencoder and the text encoders."""

from typing import Any, Self

from pydantic import Field, NonNegativeInt, PositiveInt, create_model, model_validator

from opensora_cli.core.conditions import CONDITION_MODES, ConditionMode, ReferenceLengths
from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.settings.base import Section
from opensora_cli.settings.components import ModelSettings, VAESettings
from opensora_cli.settings.enums import AttentionChoice, DType, VAEKind

_DEFAULT_WEIGHTS = {
    "t2v": 10.0,
    "i2v_head": 2.0,
    "i2v_tail": 1.0,
    "i2v_loop": 1.0,
    "v2v_head": 1.0,
    "v2v_tail": 1.0,
    "v2v_head_easy": 0.5,
    "v2v_tail_easy": 0.5,
}
"""Of other modes: 0, not trained unless asked for."""


def _weight_field(mode: ConditionMode) -> Any:
    weight = _DEFAULT_WEIGHTS.get(mode.name, 0.0)
    return float, Field(default=weight, ge=0, le=10**6, description=mode.description)


_FIELDS = {mode.name: _weight_field(mode) for mode in CONDITION_MODES.values()}


class ModeWeights(create_model("_ModeWeights", __base__=Section, **_FIELDS)):  # type: ignore[misc]
    """How often each condition mode is trained, compared with the others."""

    def by_mode(self) -> dict[str, float]:
        """Return the weights of the modes that are trained at all."""
        weights = {mode: float(getattr(self, mode)) for mode in type(self).model_fields}
        return {mode: weight for mode, weight in weights.items() if weight > 0}

    @model_validator(mode="after")
    def _some_mode_is_trained(self) -> Self:
        if not self.by_mode():
            raise ValueError("train_mmdit.mode_weights are all 0: give at least one mode a weight over 0")
        return self


class FrozenFileSettings(Section):
    """What the frozen parts are called, below one of the folders in `weights`."""

    vae: str = Field(default="vae.safetensors", min_length=1, description="autoencoder weights")
    t5: str = Field(default="t5", min_length=1, description="T5 folder, in the transformers layout")
    clip: str = Field(default="clip", min_length=1, description="CLIP folder, likewise")


class MMDiTTrainSettings(Section):
    """The transformer's objective: flow matching, conditioned by mode and text."""

    mode_weights: ModeWeights = ModeWeights()
    video_latent_frames: PositiveInt = Field(
        default=8,
        le=1025,
        description="latent frames given in the v2v modes, without the one more of a causal autoencoder",
    )
    easy_latent_frames: PositiveInt = Field(default=16, le=1025, description="likewise in the easy v2v modes")
    t5_dropout: float = Field(
        default=0.3162, ge=0, le=1, description="how often T5 reads the empty prompt instead of the caption"
    )
    clip_dropout: float = Field(default=0.3162, ge=0, le=1, description="likewise CLIP, independently of T5")
    add_fps: bool = Field(default=True, description="end captions with the clip's frame rate; pictures have none")
    add_motion_score: bool = Field(default=True, description="end captions with the motion score, where there is one")
    embedded_guidance: float = Field(
        default=4.0,
        ge=0,
        le=100,
        description="guidance scale as the input of a guidance-distilled model; others ignore it",
    )
    masked_loss: bool = Field(
        default=False,
        description="leave given first and last frames out of the loss, unless frames between them are given too",
    )
    thing_weight: float = Field(
        default=1.0,
        ge=1,
        le=1000,
        description="of the loss where the moving thing of a procedural scene is; elsewhere it is 1",
    )
    sigma_min: float = Field(default=1e-5, ge=0, lt=1, description="noise that is left at time 0")
    attention: AttentionChoice = Field(
        default=AttentionChoice.AUTO,
        description="attention backend of the transformer; auto: the first of a fixed order that works on the device",
    )
    frozen_dtype: DType = Field(
        default=DType.AUTO,
        description="what autoencoder and text encoders compute in, and what their results are kept in; auto: bfloat16 "
        "on CUDA, float32 on a CPU",
    )
    files: FrozenFileSettings = FrozenFileSettings()
    cache: str | None = Field(
        default=None,
        description="folder of encoded clips, as `osora data cache` makes it; what it lacks is encoded before "
        "the first step, and videos are cut at their beginning. none: clips are encoded when their turn comes, and cut "
        "at random",
    )

    @property
    def lengths(self) -> ReferenceLengths:
        """Latent frames that the v2v modes give."""
        return ReferenceLengths(video=self.video_latent_frames, easy=self.easy_latent_frames)

    def problems(self, *, model: ModelSettings, grid: LatentGrid, longest: int, procedural: bool) -> list[str]:
        """Return what contradicts the transformer, the autoencoder or the clips, of up to `longest` frames, which may
        be those of the procedural world.
        """
        problems = []
        if self.thing_weight != 1:
            name = f"train_mmdit.thing_weight={self.thing_weight:g}"
            if not (procedural and grid.is_causal):
                problems.append(f"{name} is for procedural scenes and a causal autoencoder: use 1")
            if self.masked_loss:
                problems.append(f"{name} does not go with train_mmdit.masked_loss=true: use one of them")
        channels = grid.latent_channels * model.patch_size**2
        if model.in_channels != channels:
            problems.append(
                f"model.in_channels={model.in_channels} must be the autoencoder's latent channels "
                f"({grid.latent_channels}) x model.patch_size={model.patch_size} squared: use {channels}"
            )
        modes = [CONDITION_MODES[name] for name in self.mode_weights.by_mode()]
        if not model.cond_embed and any(mode.needs_reference for mode in modes):
            problems.append("train_mmdit.mode_weights must be 0 but for t2v with model.cond_embed=false")
        most = max(self.lengths.given_latent_frames(mode, causal=grid.is_causal) for mode in modes)
        if most >= grid.latent_frames(grid.longest_clip(longest)):
            shortest = grid.num_frames(most + 1)
            problems.append(
                f"the longest clip has {longest} frame{'' if longest == 1 else 's'}, which leaves nothing to learn in "
                f"a condition mode that gives {most} latent frames: use clips of at least {shortest}, or 0 for such a "
                "mode in train_mmdit.mode_weights"
            )
        return problems


class DiscriminatorSettings(Section):
    """The discriminator: it learns to separate decoded clips from real ones, and the autoencoder to prevent that."""

    weight: float = Field(
        default=0.0, ge=0, le=10**6, description="of the adversarial term, beside what balances the gradients; 0: none"
    )
    start_step: NonNegativeInt = Field(default=0, le=10**9, description="first steps, without it")
    learning_rate: float = Field(default=1e-4, gt=0, le=1, description="of its adamw, on the plateau")
    width: int = Field(
        default=64, ge=8, le=8192, multiple_of=8, description="channels of its first layer; a multiple of 8"
    )
    layers: int = Field(default=3, ge=1, le=8, description="its layers that halve time, height and width")


class VAETrainSettings(Section):
    """The autoencoder's objective: mean absolute error, and terms with a weight each."""

    decoder_only: bool = Field(
        default=False,
        description="train the decoder alone: latents stay as they are, and so does what was trained on them",
    )
    picture_steps: NonNegativeInt = Field(
        default=0, le=10**9, description="first steps, on single frames instead of clips"
    )
    picture_batch_size: PositiveInt = Field(default=32, le=4096, description="pictures of such a step")
    single_frame_share: float = Field(
        default=0.0, ge=0, le=1, description="how often a batch of clips is cut down to pictures, one frame of each"
    )
    crop_size: NonNegativeInt = Field(
        default=0,
        le=2**16,
        description="side of the square, in pixels, that is cut out of every clip or picture at random; 0: none is",
    )
    whole_steps: NonNegativeInt = Field(
        default=0, le=10**9, description="last steps, on whole frames whatever the crop size"
    )
    squared_error_weight: float = Field(
        default=0.0, ge=0, le=10**6, description="of the squared error; the absolute one has 1"
    )
    gradient_weight: float = Field(
        default=0.0, ge=0, le=10**6, description="of the absolute error of the differences between adjacent pixels"
    )
    kl_weight: float = Field(
        default=0.0, ge=0, le=10**6, description="of the mean divergence of one latent value, in nats"
    )
    perceptual_weight: float = Field(default=0.0, ge=0, le=10**6, description="of the perceptual distance LPIPS")
    perceptual_files: tuple[str, ...] = Field(
        default=(),
        description="weights of LPIPS: vgg16-397923af.pth of torchvision and vgg.pth of LPIPS 0.1; none: without it",
    )
    discriminator: DiscriminatorSettings = DiscriminatorSettings()
    whitening_clips: NonNegativeInt = Field(
        default=0,
        le=10**9,
        description="procedural clips by which the exported latents get mean 0 and variance 1; 0: as learnt",
    )
    export_half: bool = Field(default=False, description="export in float16 instead of float32")

    def problems(self, vae: VAESettings, *, init: str | None, procedural: bool) -> list[str]:
        """Return what contradicts the autoencoder, its first weights or the data, which may be the procedural world's
        clips.
        """
        kind = vae.kind
        rules = (
            (
                self.decoder_only and init is None,
                "train_vae.decoder_only=true leaves the encoder as random as it begins: name what has a trained one, "
                "as in init=demo",
            ),
            (
                self.decoder_only and self.kl_weight > 0,
                f"train_vae.kl_weight={self.kl_weight} has no effect with train_vae.decoder_only=true: use 0",
            ),
            (
                self.decoder_only and self.picture_steps > 0,
                f"train_vae.picture_steps={self.picture_steps} ends in a change of the encoder, which "
                "train_vae.decoder_only=true keeps: use 0, and train_vae.single_frame_share",
            ),
            (
                self.decoder_only and self.whitening_clips > 0,
                f"train_vae.whitening_clips={self.whitening_clips} would change the latents, which "
                "train_vae.decoder_only=true keeps: use 0",
            ),
            (
                self.kl_weight > 0 and kind is VAEKind.DC_AE,
                f"train_vae.kl_weight={self.kl_weight} has no effect with vae.kind={kind}, which has no posterior: "
                "use 0",
            ),
            (
                self.perceptual_files and not self.perceptual_weight,
                f"train_vae.perceptual_files={','.join(self.perceptual_files)} has no effect with "
                "train_vae.perceptual_weight=0: use 0.5, or no files",
            ),
            (
                self.picture_steps > 0 and kind is not VAEKind.HUNYUAN,
                f"train_vae.picture_steps={self.picture_steps} is for causal autoencoders, and vae.kind={kind} is "
                "none: use 0, and train_vae.single_frame_share",
            ),
            (
                self.crop_size % vae.grid.spatial_compression_ratio > 0,
                f"train_vae.crop_size={self.crop_size} must be a multiple of "
                f"{vae.grid.spatial_compression_ratio}, the side of a latent",
            ),
            (
                self.picture_steps > 0 and not procedural,
                f"train_vae.picture_steps={self.picture_steps} is for procedural scenes: with data.table use 0, and "
                "buckets of 1 frame instead",
            ),
            (
                self.whitening_clips > 0 and not (procedural and kind is VAEKind.HUNYUAN),
                f"train_vae.whitening_clips={self.whitening_clips} is for vae.kind=hunyuan on procedural scenes: use 0",
            ),
        )
        return [problem for broken, problem in rules if broken]


class TextTrainSettings(Section):
    """Sizes of the two small text encoders, trained jointly to read scenes out of captions, and then frozen."""

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
