"""Architectures. A model is one entry of `ARCHITECTURES`: sizes, weights, and defaults of generation.

Settings of generation and training override single fields of an entry. Importing this module imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from opensora_cli.core.section import FileName, Section, one_of
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.vae.config import AutoencoderConfig, DCAEConfig, FluxAEConfig, HunyuanVAEConfig

AUTO = "auto"
"""Choice of the best model that the machine can run."""
DEMO = "demo"
OPEN_SORA_V2 = "open-sora-v2"
OPEN_SORA_V2_DC_AE = "open-sora-v2-dc-ae"
FLUX1_DEV = "flux1-dev"

_Tokens = Annotated[int, Field(ge=1, le=65_536)]


class TextInputs(Section):
    """Inputs of the text encoders."""

    t5_max_length: _Tokens = Field(default=512, description="Tokens that T5 reads. Shorter prompts are padded.")
    clip_max_length: _Tokens = Field(default=77, description="Tokens that CLIP reads, start and end tokens included.")
    known_words_warning: bool = Field(default=False, description="Warn about words that the text encoders do not know.")


class WeightNames(Section):
    """Names of the weights in the weights folder."""

    transformer: FileName = Field(default="Open_Sora_v2.safetensors", description="MMDiT weights.")
    vae: FileName = Field(default="hunyuan_vae.safetensors", description="Autoencoder weights.")
    t5: FileName = Field(default="google/t5-v1_1-xxl", description="T5 folder in the transformers layout.")
    clip: FileName = Field(default="openai/clip-vit-large-patch14", description="CLIP folder in that layout.")
    turbo: FileName = Field(default="turbo", description="Folder of the few-step adapter of --turbo.")
    hub_repo: FileName = Field(default="hpcai-tech/Open-Sora-v2", description="Hub repository of all these files.")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Model for videos or pictures."""

    transformer: MMDiTConfig
    autoencoder: AutoencoderConfig
    spatial_tiling: bool = True
    temporal_tiling: bool = False
    text: TextInputs = field(default_factory=TextInputs)
    files: WeightNames = field(default_factory=WeightNames)
    hub_names: Mapping[str, str] = field(default_factory=dict)
    """Hub names of files that have another name in the Hub repository."""
    is_packaged: bool = False
    """Whether osora contains the weights."""
    presets: tuple[str, ...] = ()
    """Presets of `osora generate`: one for each resolution, or one for all."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Settings of generation by dotted key. Other settings keep their own defaults."""


ARCHITECTURES: dict[str, Architecture] = {
    DEMO: Architecture(
        transformer=MMDiTConfig(
            in_channels=256,
            vec_in_dim=128,
            context_in_dim=128,
            hidden_size=256,
            num_heads=4,
            depth=2,
            depth_single_blocks=8,
            axes_dim=(16, 24, 24),
            patch_size=4,
            predicts_data=True,
        ),
        # Tiles are as large as the whole video, and a temporal tile has one frame more.
        autoencoder=HunyuanVAEConfig(
            block_out_channels=(16, 32, 96),
            layers_per_block=1,
            norm_num_groups=4,
            sample_size=128,
            sample_tsize=32,
            scale_factor=1.0,
            spatial_compression_ratio=4,
        ),
        spatial_tiling=False,
        text=TextInputs(t5_max_length=32, clip_max_length=32, known_words_warning=True),
        files=WeightNames(transformer="transformer.safetensors", vae="vae.safetensors", t5="t5", clip="clip"),
        is_packaged=True,
        presets=("demo",),
        defaults={
            "video.resolution": "128px",
            "video.aspect_ratio": "1:1",
            "video.num_frames": 33,
            # The demo learned from clips alone in the end: the first frame of a clip is better than a lone picture.
            "video.picture_frames": 33,
            "video.fps": 12,
            "video.resolutions": ("128px",),
            "video.aspect_ratios": ("1:1",),
            "video.max_frames": 33,
            "sampling.num_inference_steps": 30,
            "sampling.guidance_scale": 4.0,
            "sampling.image_guidance_scale": 1.0,
            # Of nine latent frames, v2v gives the first or last 3 (+1), and its easy form 5 (+1).
            "condition.video_latent_frames": 3,
            "condition.easy_latent_frames": 5,
            # Captions in the demo's training data have neither.
            "prompt_suffix.motion_score": None,
            "prompt_suffix.add_fps": False,
            "picture.resolution": "128px",
            "picture.own_model": True,
        },
    ),
    OPEN_SORA_V2: Architecture(
        transformer=MMDiTConfig(),
        autoencoder=HunyuanVAEConfig(),
        presets=("256px", "768px"),
    ),
    OPEN_SORA_V2_DC_AE: Architecture(
        transformer=MMDiTConfig(in_channels=128, patch_size=1),
        autoencoder=DCAEConfig(),
        temporal_tiling=True,
        files=WeightNames(
            transformer="Open_Sora_v2_Video_DC_AE.safetensors",
            vae="F32T4C128_AE.safetensors",
            hub_repo="hpcai-tech/Open-Sora-v2-Video-DC-AE",
        ),
        presets=("high_compression",),
        defaults={"video.num_frames": 128, "video.max_frames": 128},
    ),
    FLUX1_DEV: Architecture(
        transformer=MMDiTConfig(guidance_embed=True, cond_embed=False),
        autoencoder=FluxAEConfig(),
        spatial_tiling=False,
        files=WeightNames(
            transformer="flux1-dev.safetensors",
            vae="flux1-dev-ae.safetensors",
            hub_repo="black-forest-labs/FLUX.1-dev",
        ),
        hub_names={"flux1-dev-ae.safetensors": "ae.safetensors"},
        presets=("flux1_dev",),
        defaults={
            "video.resolution": "768px",
            "video.num_frames": 1,
            # Sizes are those of the training's table. Another aspect ratio takes the nearest.
            "video.resolutions": ("256px", "768px", "1024px"),
            "video.max_frames": 1,
            "prompt_suffix.motion_score": None,
            "prompt_suffix.add_fps": False,
        },
    ),
}


DOWNLOADS = [name for name, entry in ARCHITECTURES.items() if not entry.is_packaged]
"""Models with weights on the Hub."""

ModelName = Annotated[str, one_of(lambda: ARCHITECTURES)]
ModelChoice = Annotated[str, one_of(lambda: (AUTO, *ARCHITECTURES))]
"""Name of a model, or auto."""
DownloadName = Annotated[str, one_of(lambda: DOWNLOADS)]
