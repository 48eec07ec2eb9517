"""Settings of the parts that generating and training share: the models and their files."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from opensora_cli.core.latent_grid import LatentGrid
from opensora_cli.core.linear_products import LinearProducts
from opensora_cli.settings.base import MAX_FRAMES, MAX_SIDE, Section, split_list
from opensora_cli.settings.enums import ModelName, VAEKind

DOWNLOAD_COMMAND = "osora ckpt download open-sora-v2"
"""The line that fetches the released weights to where they are looked for."""

MAX_WIDTH = 65_536
"""Features of a layer of the transformer, and its heads."""
MAX_CHANNELS = 8192
"""Channels of a layer or a latent of an autoencoder, and groups of them."""
MAX_DEPTH = 32
"""Blocks in a row at one width of an autoencoder."""
MAX_STAGES = 16
"""Widths of an autoencoder, each half the resolution of the one before."""

_Channels = Annotated[PositiveInt, Field(le=MAX_CHANNELS)]
_Depth = Annotated[PositiveInt, Field(le=MAX_DEPTH)]

_WITH_SCALE = re.compile(r"(?P<path>.+):(?P<scale>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)", re.IGNORECASE | re.DOTALL)
_KEYS_OF_ALL_KINDS = frozenset({"kind", "spatial_tiling", "temporal_tiling"})


class Tf32Settings(Section):
    """How float32 is computed with."""

    tf32: bool | None = Field(
        default=None,
        description="multiply float32 matrices and convolve in TF32, which GPUs have from compute capability 8.0: a "
        "mantissa of 10 bits is faster, and results in float32 differ in the third digit; false: neither; none: as "
        "torch does, which is TF32 for convolutions alone. Half precision is not affected",
    )

    def tf32_problems(self, *, key: str, device: str) -> list[str]:
        """Return why `tf32` has no effect on a device whose setting is called `key`."""
        if self.tf32 is None or device != "cpu":
            return []
        return [f"precision.tf32={str(self.tf32).lower()} has no effect with {key}=cpu: use none"]


class GenerationPrecisionSettings(Tf32Settings):
    """With how many bits a generation computes, beside `runtime.dtype`."""

    linear: LinearProducts = Field(
        default=LinearProducts.EXACT,
        description="multiply the linear layers of the transformer's blocks in 8 bits, which halves their weights "
        "against bfloat16 and changes the result: int8 on a CPU, or a GPU from compute capability 8.0; fp8 (e4m3) on "
        "one from 8.9. The error is printed",
    )


class ModelSettings(Section):
    """Name and sizes of the MMDiT. The defaults are those of the released 11B model."""

    name: ModelName = Field(default=ModelName.OPEN_SORA_V2, description="which model")
    in_channels: PositiveInt = Field(
        default=64, le=MAX_WIDTH, description="channels of a packed token: latent channels x patch_size squared"
    )
    vec_in_dim: PositiveInt = Field(default=768, le=MAX_WIDTH, description="width of the pooled CLIP embedding")
    context_in_dim: PositiveInt = Field(default=4096, le=MAX_WIDTH, description="width of the T5 embeddings")
    hidden_size: PositiveInt = Field(default=3072, le=MAX_WIDTH, description="width of the transformer")
    mlp_ratio: float = Field(default=4.0, ge=0.001, le=1024, description="width of the MLPs over hidden_size")
    num_heads: PositiveInt = Field(default=24, le=MAX_WIDTH, description="attention heads; divides hidden_size")
    depth: int = Field(default=19, ge=0, le=1000, description="double-stream blocks")
    depth_single_blocks: int = Field(default=38, ge=0, le=1000, description="single-stream blocks")
    axes_dim: tuple[Annotated[PositiveInt, Field(le=MAX_WIDTH)], ...] = Field(
        default=(16, 56, 56),
        description="rotary widths of time, height and width; even, with the width of a head as their sum",
    )
    theta: float = Field(default=10_000, ge=0.001, le=10**9, description="base of the rotary frequencies")
    qkv_bias: bool = Field(default=True, description="whether the attention projections have a bias")
    guidance_embed: bool = Field(default=False, description="whether the model is guidance-distilled")
    cond_embed: bool = Field(default=True, description="whether the model takes reference latents")
    patch_size: PositiveInt = Field(default=2, le=1024, description="latent pixels along the side of a token")
    predicts_data: bool = Field(
        default=False, description="whether the transformer puts out the data, from which its velocity is computed"
    )

    @field_validator("name")
    @classmethod
    def _name_is_a_model(cls, value: ModelName) -> ModelName:
        if value is ModelName.AUTO:
            raise ValueError("model.name=auto must be a model: use runtime.model_choice=auto")
        return value

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"model.num_heads={self.num_heads} must divide model.hidden_size={self.hidden_size}")
        head = self.hidden_size // self.num_heads
        axes = ",".join(map(str, self.axes_dim))
        if len(self.axes_dim) != 3 or sum(self.axes_dim) != head or any(dim % 2 for dim in self.axes_dim):
            raise ValueError(
                f"model.axes_dim={axes} must be three even numbers (time, height, width) that add up to {head}, "
                f"the width of a head (model.hidden_size={self.hidden_size} / model.num_heads={self.num_heads})"
            )
        if not int(self.hidden_size * self.mlp_ratio):
            raise ValueError(
                f"model.mlp_ratio={self.mlp_ratio:g} must give the MLPs of model.hidden_size={self.hidden_size} a width"
            )
        return self


class DCAESettings(Section):
    """Sizes of the video DC-AE. The defaults are those of the released one; lists go from the pixels inwards."""

    latent_channels: PositiveInt = Field(
        default=128, le=MAX_CHANNELS, description="channels of the latents; divides the last width"
    )
    block_types: tuple[Literal["res", "efficientvit"], ...] = Field(
        default=("res", "res", "res", "efficientvit", "efficientvit", "efficientvit"),
        min_length=1,
        max_length=MAX_STAGES,
        description="what each stage is made of: res or efficientvit",
    )
    width_list: tuple[_Channels, ...] = Field(
        default=(128, 256, 512, 512, 1024, 1024), description="widths; multiples of 32 in efficientvit stages"
    )
    encoder_depth_list: tuple[_Depth, ...] = Field(
        default=(2, 2, 2, 3, 3, 3), description="blocks of the encoder's stages"
    )
    decoder_depth_list: tuple[_Depth, ...] = Field(
        default=(3, 3, 3, 3, 3, 3), description="blocks of the decoder's stages"
    )
    temporal: tuple[bool, ...] = Field(
        default=(False, False, False, True, True, False), description="after which stages time is halved, too"
    )
    spatial_tile_size: PositiveInt = Field(default=256, le=MAX_SIDE, description="side of a spatial tile, in pixels")
    temporal_tile_size: PositiveInt = Field(
        default=32, le=MAX_FRAMES, description="length of a temporal tile, in frames"
    )
    tile_overlap_factor: float = Field(
        default=0.25, ge=0, lt=1, description="part of a tile that the next one covers too"
    )
    scaling_factor: float | None = Field(
        default=None,
        ge=1e-6,
        le=10**6,
        description="latents = encoded / scaling_factor; none: latents are what is encoded. The reference trains with "
        "0.493 and generates with none",
    )

    @property
    def grid(self) -> LatentGrid:
        """How frames and pixels are mapped to latents."""
        return LatentGrid(
            latent_channels=self.latent_channels,
            time_compression_ratio=int(2 ** sum(self.temporal)),
            spatial_compression_ratio=int(2 ** (len(self.width_list) - 1)),
            is_causal=False,
        )

    @model_validator(mode="after")
    def _lists_are_equally_long(self) -> Self:
        for name in ("width_list", "encoder_depth_list", "decoder_depth_list", "temporal"):
            if (found := len(getattr(self, name))) != len(self.block_types):
                raise ValueError(
                    f"vae.dc_ae.{name} has {found} entries and must have {len(self.block_types)}, "
                    "as vae.dc_ae.block_types has"
                )
        return self


class FluxAESettings(Section):
    """Sizes of the 2D autoencoder. The defaults are those of the released one."""

    z_channels: PositiveInt = Field(default=16, le=MAX_CHANNELS, description="channels of the latents")
    ch: PositiveInt = Field(default=128, le=MAX_CHANNELS, description="base of the widths; a multiple of 32")
    ch_mult: tuple[_Depth, ...] = Field(
        default=(1, 2, 4, 4), min_length=1, max_length=MAX_STAGES, description="widths over ch, from the pixels inwards"
    )
    num_res_blocks: PositiveInt = Field(default=2, le=MAX_DEPTH, description="residual blocks at each width")
    scale_factor: float = Field(
        default=0.3611, ge=1e-6, le=10**6, description="latents = scale_factor x (sample - shift_factor)"
    )
    shift_factor: float = Field(default=0.1159, ge=-(10**6), le=10**6, description="see scale_factor")
    tile_size: PositiveInt = Field(default=1024, le=MAX_SIDE, description="side of a spatial tile, in pixels")
    tile_overlap_factor: float = Field(
        default=0.25, ge=0, lt=1, description="part of a tile that the next one covers too"
    )

    @property
    def grid(self) -> LatentGrid:
        """How frames and pixels are mapped to latents."""
        return LatentGrid(
            latent_channels=self.z_channels,
            time_compression_ratio=1,
            spatial_compression_ratio=int(2 ** (len(self.ch_mult) - 1)),
            is_causal=False,
        )


class VAESettings(Section):
    """Which autoencoder, with its sizes and tiling.

    The keys beside `kind` and the two tilings are those of the causal one (`hunyuan`), whose defaults are of the
    released weights. The others have sections of their own.
    """

    kind: VAEKind = Field(default=VAEKind.HUNYUAN, description="which autoencoder: hunyuan, dc_ae or flux_ae")
    latent_channels: PositiveInt = Field(default=16, le=MAX_CHANNELS, description="channels of the latents")
    block_out_channels: tuple[_Channels, ...] = Field(
        default=(128, 256, 512, 512), min_length=1, max_length=MAX_STAGES, description="widths, from the pixels inwards"
    )
    layers_per_block: PositiveInt = Field(default=2, le=MAX_DEPTH, description="residual blocks at each width")
    norm_num_groups: PositiveInt = Field(
        default=32, le=MAX_CHANNELS, description="groups of the group norms; divides every width"
    )
    sample_size: PositiveInt = Field(default=256, le=MAX_SIDE, description="side of a spatial tile, in pixels")
    sample_tsize: PositiveInt = Field(default=64, le=MAX_FRAMES, description="length of a temporal tile, in frames")
    tile_overlap_factor: float = Field(
        default=0.25, ge=0, lt=1, description="part of a tile that the next one covers too"
    )
    scale_factor: float = Field(
        default=0.476986, ge=1e-6, le=10**6, description="latents = scale_factor x (sample - shift_factor)"
    )
    shift_factor: float = Field(default=0.0, ge=-(10**6), le=10**6, description="see scale_factor")
    time_compression_ratio: PositiveInt = Field(
        default=4, le=1024, description="frames to one latent frame, after the first"
    )
    spatial_compression_ratio: PositiveInt = Field(
        default=8, le=1024, description="pixels to one latent pixel, along each side"
    )
    spatial_tiling: bool = Field(
        default=True,
        description="encode and decode in tiles of sample_size pixels, or as many as in the kind's section",
    )
    temporal_tiling: bool = Field(
        default=False, description="likewise in tiles of sample_tsize frames; flux_ae frame by frame"
    )
    dc_ae: DCAESettings = Field(default=DCAESettings(), description="sizes and tiles of kind dc_ae")
    flux_ae: FluxAESettings = Field(default=FluxAESettings(), description="sizes and tiles of kind flux_ae")

    @property
    def grid(self) -> LatentGrid:
        """How frames and pixels are mapped to latents, by the chosen kind."""
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
        """Channels of the layers that work on whole pixels."""
        if self.kind is VAEKind.DC_AE:
            return self.dc_ae.width_list[0]
        return self.flux_ae.ch * self.flux_ae.ch_mult[0] if self.kind is VAEKind.FLUX_AE else self.block_out_channels[0]

    @model_validator(mode="after")
    def _groups_divide_widths(self) -> Self:
        for width in self.block_out_channels:
            if width % self.norm_num_groups:
                raise ValueError(
                    f"vae.norm_num_groups={self.norm_num_groups} must divide every width of vae.block_out_channels, "
                    f"and {width} is one"
                )
        return self

    @property
    def scale(self) -> tuple[str, ...]:
        """The settings that decide the scale of the latents, each as `KEY=VALUE`."""
        if self.kind is VAEKind.DC_AE:
            factor = self.dc_ae.scaling_factor
            return (f"vae.dc_ae.scaling_factor={'none' if factor is None else factor}",)
        section, key = (self.flux_ae, "vae.flux_ae") if self.kind is VAEKind.FLUX_AE else (self, "vae")
        return f"{key}.scale_factor={section.scale_factor}", f"{key}.shift_factor={section.shift_factor}"

    @staticmethod
    def owner(name: str) -> VAEKind | None:
        """Return the kind that a key is of; None: it is of all."""
        if name in _KEYS_OF_ALL_KINDS:
            return None
        return VAEKind(name) if name in list(VAEKind) else VAEKind.HUNYUAN

    @model_validator(mode="after")
    def _everything_has_an_effect(self) -> Self:
        for name, details in type(self).model_fields.items():
            value, owner = getattr(self, name), self.owner(name)
            if owner not in (None, self.kind) and value != details.default:
                setting = f"vae.{name}" if isinstance(value, Section) else f"vae.{name}={value}"
                raise ValueError(f"{setting} has no effect with vae.kind={self.kind}: drop it, or use vae.kind={owner}")
        return self


class TextSettings(Section):
    """The text encoders."""

    t5_max_length: PositiveInt = Field(
        default=512, le=65_536, description="tokens that T5 reads; shorter prompts are padded to it"
    )
    clip_max_length: PositiveInt = Field(
        default=77, le=65_536, description="tokens that CLIP reads, its start and end included"
    )
    known_words_warning: bool = Field(default=False, description="warn about words that the text encoders never saw")


class FileSettings(Section):
    """Where the weights lie, below the weights folder."""

    transformer: str = Field(default="Open_Sora_v2.safetensors", min_length=1, description="MMDiT weights")
    vae: str = Field(default="hunyuan_vae.safetensors", min_length=1, description="autoencoder weights")
    t5: str = Field(default="google/t5-v1_1-xxl", min_length=1, description="T5 folder, in the transformers layout")
    clip: str = Field(default="openai/clip-vit-large-patch14", min_length=1, description="CLIP folder, likewise")
    hub_repo: str = Field(
        default="hpcai-tech/Open-Sora-v2", min_length=1, description="Hub repository that has them all"
    )


class LoraFile(Section):
    """An adapter that is added to the transformer while a video is made."""

    path: str = Field(
        min_length=1, description="folder that PEFT has saved, or a .safetensors file in any common style"
    )
    scale: float = Field(default=1.0, ge=-100, le=100, description="how much of it is added; below 0: taken away")
    sha256: str | None = Field(default=None, description="of its files, where they must be those of an earlier run")

    @classmethod
    def of_text(cls, text: str) -> dict[str, str]:
        """Return the fields in `FILE[:SCALE]`. A path that ends in a colon and a number needs its scale after it."""
        match = _WITH_SCALE.fullmatch(text.strip())
        return match.groupdict() if match else {"path": text.strip()}

    @classmethod
    def of_list(cls, value: object) -> object:
        """Return a list of adapters as it can be validated: as text separated by `;`, and each may be a text again."""
        files = split_list(value, separator=";") if isinstance(value, str) else value
        if not isinstance(files, list | tuple):
            return files
        return tuple(cls.of_text(file) if isinstance(file, str) else file for file in files)

    @property
    def shown(self) -> str:
        """The adapter as it can be typed."""
        if self.scale == 1 and _WITH_SCALE.fullmatch(self.path) is None:
            return self.path
        return f"{self.path}:{str(self.scale).removesuffix('.0')}"
