"""Settings of the models and their files, shared by generation and training."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.core.linear_products import LinearProducts
from opensora_cli.settings.base import MAX_FRAMES, MAX_SIDE, FileName, Section, split_list
from opensora_cli.settings.enums import ModelName, VAEKind

DOWNLOAD_COMMAND = "osora ckpt download open-sora-v2"
"""Command that downloads the released weights."""

_Width = Annotated[int, Field(ge=1, le=65_536)]
"""Features or heads of a transformer layer."""
_Channels = Annotated[int, Field(ge=1, le=8192)]
_Depth = Annotated[int, Field(ge=1, le=32)]
"""Blocks at one width of an autoencoder."""
_Blocks = Annotated[int, Field(ge=0, le=1000)]
_Overlap = Annotated[float, Field(ge=0, lt=1)]
_Scale = Annotated[float, Field(ge=1e-6, le=10**6)]
_Shift = Annotated[float, Field(ge=-(10**6), le=10**6)]
_Ratio = Annotated[int, Field(ge=1, le=1024)]
_TileSide = Annotated[int, Field(ge=1, le=MAX_SIDE)]
_TileLength = Annotated[int, Field(ge=1, le=MAX_FRAMES)]
_Tokens = Annotated[int, Field(ge=1, le=65_536)]
_MAX_STAGES = 16
"""Largest number of widths of an autoencoder. Each stage halves the resolution."""

OF_ALL_KINDS = ("kind", "spatial_tiling", "temporal_tiling", "dc_ae", "flux_ae")
"""Keys of `VAESettings` that do not belong to the kind hunyuan."""

_WITH_SCALE = re.compile(r"(?P<path>.+):(?P<scale>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)", re.IGNORECASE | re.DOTALL)


class Tf32Settings(Section):
    """Precision of float32 computation."""

    tf32: bool | None = Field(
        default=None,
        description="Compute float32 matrix products and convolutions in TF32 (GPUs from compute capability 8.0): "
        "faster, with a mantissa of 10 bits. None means torch's default, TF32 for convolutions alone.",
    )


class GenerationPrecisionSettings(Tf32Settings):
    """Precision of generation, in addition to `runtime.dtype`."""

    linear: LinearProducts = Field(
        default=LinearProducts.EXACT,
        description="Precision of the linear layers in transformer blocks. int8 (GPU from compute capability 8.0) "
        "and fp8 (GPU from 8.9) halve bfloat16 weights and change the result. The error is printed.",
    )


class ModelSettings(Section):
    """Name and sizes of the MMDiT. The defaults describe the released 11B model."""

    name: ModelName = Field(default=ModelName.OPEN_SORA_V2, description="Model.")
    in_channels: _Width = Field(default=64, description="Channels of a token: latent channels x patch_size squared.")
    vec_in_dim: _Width = Field(default=768, description="Width of the pooled CLIP embedding.")
    context_in_dim: _Width = Field(default=4096, description="Width of the T5 embeddings.")
    hidden_size: _Width = Field(default=3072, description="Width of the transformer.")
    mlp_ratio: float = Field(default=4.0, ge=0.001, le=1024, description="Width of the MLPs relative to hidden_size.")
    num_heads: _Width = Field(default=24, description="Attention heads. They divide hidden_size.")
    depth: _Blocks = Field(default=19, description="Double-stream blocks.")
    depth_single_blocks: _Blocks = Field(default=38, description="Single-stream blocks.")
    axes_dim: tuple[_Width, ...] = Field(
        default=(16, 56, 56), description="Even rotary widths of time, height and width. Their sum is the head width."
    )
    theta: float = Field(default=10_000, ge=0.001, le=10**9, description="Base of the rotary frequencies.")
    qkv_bias: bool = Field(default=True, description="Whether the attention projections have a bias.")
    guidance_embed: bool = Field(default=False, description="Whether the model is guidance-distilled.")
    cond_embed: bool = Field(default=True, description="Whether the model takes reference latents.")
    patch_size: _Ratio = Field(default=2, description="Side of a token in latent pixels.")
    predicts_data: bool = Field(default=False, description="Whether the transformer predicts data, not velocity.")

    @field_validator("name")
    @classmethod
    def _name_is_a_model(cls, value: ModelName) -> ModelName:
        if value is ModelName.AUTO:
            raise ValueError("model.name=auto must be a model: use runtime.model_choice=auto")
        return value

    def rules(self) -> Iterator[str]:
        if self.hidden_size % self.num_heads:
            yield f"model.num_heads={self.num_heads} must divide model.hidden_size={self.hidden_size}"
            return
        head = self.hidden_size // self.num_heads
        if len(self.axes_dim) != 3 or sum(self.axes_dim) != head or any(dim % 2 for dim in self.axes_dim):
            axes = ",".join(map(str, self.axes_dim))
            yield (
                f"model.axes_dim={axes} must be three even numbers (time, height, width) that add up to {head}, "
                f"the width of a head (model.hidden_size={self.hidden_size} / model.num_heads={self.num_heads})"
            )
        if not int(self.hidden_size * self.mlp_ratio):
            yield (
                f"model.mlp_ratio={self.mlp_ratio:g} must give the MLPs of model.hidden_size={self.hidden_size} a width"
            )


class DCAESettings(Section):
    """Sizes of the video DC-AE. The defaults describe the released one. Lists start at the pixels."""

    latent_channels: _Channels = Field(default=128, description="Channels of the latents. They divide the last width.")
    block_types: tuple[Literal["res", "efficientvit"], ...] = Field(
        default=("res", "res", "res", "efficientvit", "efficientvit", "efficientvit"),
        min_length=1,
        max_length=_MAX_STAGES,
        description="Block type of each stage: res or efficientvit.",
    )
    width_list: tuple[_Channels, ...] = Field(
        default=(128, 256, 512, 512, 1024, 1024), description="Widths. Multiples of 32 in efficientvit stages."
    )
    encoder_depth_list: tuple[_Depth, ...] = Field(default=(2, 2, 2, 3, 3, 3), description="Blocks of encoder stages.")
    decoder_depth_list: tuple[_Depth, ...] = Field(default=(3, 3, 3, 3, 3, 3), description="Blocks of decoder stages.")
    temporal: tuple[bool, ...] = Field(
        default=(False, False, False, True, True, False), description="Stages that halve time."
    )
    spatial_tile_size: _TileSide = Field(default=256, description="Side of a spatial tile in pixels.")
    temporal_tile_size: _TileLength = Field(default=32, description="Length of a temporal tile in frames.")
    tile_overlap_factor: _Overlap = Field(default=0.25, description="Overlap of neighboring tiles, relative to a tile.")
    scaling_factor: _Scale | None = Field(
        default=None,
        description="Latents are the encoder's output divided by it. None means 1. The reference trains with 0.493 and "
        "generates with none.",
    )

    @property
    def grid(self) -> LatentGrid:
        """Mapping from frames and pixels to latents."""
        return LatentGrid(
            latent_channels=self.latent_channels,
            time_compression_ratio=int(2 ** sum(self.temporal)),
            spatial_compression_ratio=int(2 ** (len(self.width_list) - 1)),
            is_causal=False,
        )

    def rules(self) -> Iterator[str]:
        stages = len(self.block_types)
        for name in ("width_list", "encoder_depth_list", "decoder_depth_list", "temporal"):
            if (found := len(getattr(self, name))) != stages:
                yield f"vae.dc_ae.{name} has {found} entries and must have {stages}, as vae.dc_ae.block_types has"


class FluxAESettings(Section):
    """Sizes of the 2D autoencoder. The defaults describe the released one."""

    z_channels: _Channels = Field(default=16, description="Channels of the latents.")
    ch: _Channels = Field(default=128, description="Base width, a multiple of 32.")
    ch_mult: tuple[_Depth, ...] = Field(
        default=(1, 2, 4, 4),
        min_length=1,
        max_length=_MAX_STAGES,
        description="Widths relative to ch, from the pixels.",
    )
    num_res_blocks: _Depth = Field(default=2, description="Residual blocks at each width.")
    scale_factor: _Scale = Field(default=0.3611, description="Latents are scale_factor x (sample - shift_factor).")
    shift_factor: _Shift = Field(default=0.1159, description="Shift of the latents, see scale_factor.")
    tile_size: _TileSide = Field(default=1024, description="Side of a spatial tile in pixels.")
    tile_overlap_factor: _Overlap = Field(default=0.25, description="Overlap of neighboring tiles, relative to a tile.")

    @property
    def grid(self) -> LatentGrid:
        """Mapping from frames and pixels to latents."""
        return LatentGrid(
            latent_channels=self.z_channels,
            time_compression_ratio=1,
            spatial_compression_ratio=int(2 ** (len(self.ch_mult) - 1)),
            is_causal=False,
        )


class VAESettings(Section):
    """Kind, sizes and tiling of the autoencoder.

    Keys beside `kind` and the two tilings belong to the causal autoencoder `hunyuan`, and their defaults describe the
    released one. Other kinds have sections.
    """

    kind: VAEKind = Field(default=VAEKind.HUNYUAN, description="Autoencoder: hunyuan, dc_ae or flux_ae.")
    latent_channels: _Channels = Field(default=16, description="Channels of the latents.")
    block_out_channels: tuple[_Channels, ...] = Field(
        default=(128, 256, 512, 512), min_length=1, max_length=_MAX_STAGES, description="Widths, from the pixels."
    )
    layers_per_block: _Depth = Field(default=2, description="Residual blocks at each width.")
    norm_num_groups: _Channels = Field(default=32, description="Groups of the group norms. They divide every width.")
    sample_size: _TileSide = Field(default=256, description="Side of a spatial tile in pixels.")
    sample_tsize: _TileLength = Field(default=64, description="Length of a temporal tile in frames.")
    tile_overlap_factor: _Overlap = Field(default=0.25, description="Overlap of neighboring tiles, relative to a tile.")
    scale_factor: _Scale = Field(default=0.476986, description="Latents are scale_factor x (sample - shift_factor).")
    shift_factor: _Shift = Field(default=0.0, description="Shift of the latents, see scale_factor.")
    time_compression_ratio: _Ratio = Field(default=4, description="Frames of a latent frame, after the first.")
    spatial_compression_ratio: _Ratio = Field(default=8, description="Pixels of a latent pixel, along each side.")
    spatial_tiling: bool = Field(default=True, description="Encode and decode in spatial tiles.")
    temporal_tiling: bool = Field(
        default=False, description="Encode and decode in temporal tiles, for flux_ae of one frame."
    )
    dc_ae: DCAESettings = Field(default=DCAESettings(), description="Sizes and tiles of kind dc_ae.")
    flux_ae: FluxAESettings = Field(default=FluxAESettings(), description="Sizes and tiles of kind flux_ae.")

    @property
    def grid(self) -> LatentGrid:
        """Mapping from frames and pixels to latents of the chosen kind."""
        if self.kind is VAEKind.DC_AE:
            return self.dc_ae.grid
        if self.kind is VAEKind.FLUX_AE:
            return self.flux_ae.grid
        return LatentGrid(
            latent_channels=self.latent_channels,
            time_compression_ratio=self.time_compression_ratio,
            spatial_compression_ratio=self.spatial_compression_ratio,
            is_causal=True,
        )

    @property
    def pixel_width(self) -> int:
        """Channels of the layers at full resolution."""
        if self.kind is VAEKind.DC_AE:
            return self.dc_ae.width_list[0]
        return self.flux_ae.ch * self.flux_ae.ch_mult[0] if self.kind is VAEKind.FLUX_AE else self.block_out_channels[0]

    @property
    def scale(self) -> tuple[str, ...]:
        """Settings of the latents' scale as `KEY=VALUE`."""
        if self.kind is VAEKind.DC_AE:
            factor = self.dc_ae.scaling_factor
            return (f"vae.dc_ae.scaling_factor={'none' if factor is None else factor}",)
        section, key = (self.flux_ae, "vae.flux_ae") if self.kind is VAEKind.FLUX_AE else (self, "vae")
        return f"{key}.scale_factor={section.scale_factor}", f"{key}.shift_factor={section.shift_factor}"

    def rules(self) -> Iterator[str]:
        for width in self.block_out_channels:
            if width % self.norm_num_groups:
                yield (
                    f"vae.norm_num_groups={self.norm_num_groups} must divide every width of vae.block_out_channels, "
                    f"and {width} is one"
                )
                return


class TextSettings(Section):
    """Text encoders."""

    t5_max_length: _Tokens = Field(default=512, description="Tokens that T5 reads. Shorter prompts are padded.")
    clip_max_length: _Tokens = Field(default=77, description="Tokens that CLIP reads, start and end tokens included.")
    known_words_warning: bool = Field(default=False, description="Warn about words that the text encoders do not know.")


class FileSettings(Section):
    """Names of the weights in the weights folder."""

    transformer: FileName = Field(default="Open_Sora_v2.safetensors", description="MMDiT weights.")
    vae: FileName = Field(default="hunyuan_vae.safetensors", description="Autoencoder weights.")
    t5: FileName = Field(default="google/t5-v1_1-xxl", description="T5 folder in the transformers layout.")
    clip: FileName = Field(default="openai/clip-vit-large-patch14", description="CLIP folder in that layout.")
    hub_repo: FileName = Field(default="hpcai-tech/Open-Sora-v2", description="Hub repository of all these files.")


class LoraFile(Section):
    """Adapter that is added to the transformer."""

    path: FileName = Field(description="PEFT folder, or .safetensors file in any common style.")
    scale: float = Field(default=1.0, ge=-100, le=100, description="Strength. A negative value subtracts the adapter.")
    sha256: str | None = Field(default=None, description="Hash of the adapter in an earlier run, checked if set.")

    @classmethod
    def of_list(cls, value: object) -> object:
        """Return adapters ready for validation. Text has `FILE[:SCALE]` separated by `;`.

        A path that ends in a colon and a number needs a scale.
        """
        files = split_list(value, separator=";") if isinstance(value, str) else value
        if not isinstance(files, list | tuple):
            return files
        return tuple(cls._of_text(file) if isinstance(file, str) else file for file in files)

    @classmethod
    def _of_text(cls, text: str) -> dict[str, str]:
        match = _WITH_SCALE.fullmatch(text.strip())
        return match.groupdict() if match else {"path": text.strip()}

    @property
    def shown(self) -> str:
        """The adapter as it is typed."""
        if self.scale == 1 and _WITH_SCALE.fullmatch(self.path) is None:
            return self.path
        return f"{self.path}:{str(self.scale).removesuffix('.0')}"
