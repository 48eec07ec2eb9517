"""The transformer's objective."""

from enum import StrEnum
from typing import Any, Self

from pydantic import Field, PositiveInt, create_model, model_validator

from opensora_cli.core.conditions import CONDITION_MODES, ConditionMode, ReferenceLengths
from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.settings.base import Section
from opensora_cli.settings.components import ModelSettings
from opensora_cli.settings.enums import DType


class TrainAttention(StrEnum):
    """How the transformer's attention is computed in training."""

    SDPA = "sdpa"
    """Torch's fused kernels."""
    BF16_PRODUCTS = "bf16_products"
    """Two matrix products in bfloat16, with all weights in between: quicker on a CPU for some hundred tokens."""


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
        description="guidance scale that a guidance-distilled model is told; others have no use for it",
    )
    masked_loss: bool = Field(
        default=False,
        description="leave given first and last frames out of the loss, unless frames between them are given too",
    )
    sigma_min: float = Field(default=1e-5, ge=0, lt=1, description="noise that is left at time 0")
    attention: TrainAttention = Field(
        default=TrainAttention.SDPA,
        description="sdpa: torch's fused kernels; bf16_products: quicker on a CPU for some hundred tokens",
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

    def problems(self, *, model: ModelSettings, grid: LatentGrid, longest: int) -> list[str]:
        """Return what contradicts the transformer, the autoencoder or the clips, one line for each.

        Args:
            model: the transformer.
            grid: of the autoencoder.
            longest: frames of the longest clip.
        """
        problems = []
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
                f"no clip is longer than {longest} frames, which leaves nothing to learn in a condition mode that "
                f"gives {most} latent frames: use clips of at least {shortest}, or 0 for such a mode in "
                "train_mmdit.mode_weights"
            )
        return problems
