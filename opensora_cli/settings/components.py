"""Settings of the models and their files, shared by generation and training."""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field, model_validator

from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.conditions import LatentGrid
from opensora_cli.core.section import FileName, Section, SplitAt, nested
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.registry import ARCHITECTURES, OPEN_SORA_V2, ModelName
from opensora_cli.models.vae.config import AutoencoderConfig, DCAEConfig, FluxAEConfig, HunyuanSizes, HunyuanVAEConfig

DOWNLOAD_COMMAND = "osora ckpt download open-sora-v2"
"""Command that downloads the released weights."""


class VAEKind(StrEnum):
    """Autoencoder: a video model with compression 4x8x8 or 4x32x32, or a picture model with 1x8x8."""

    HUNYUAN = "hunyuan"
    DC_AE = "dc_ae"
    FLUX_AE = "flux_ae"

    @property
    def makes_videos(self) -> bool:
        """Whether models generate videos with it."""
        return self is not VAEKind.FLUX_AE


OF_ALL_KINDS = ("kind", "spatial_tiling", "temporal_tiling", "dc_ae", "flux_ae")
"""Keys of `VAESettings` that do not belong to the kind hunyuan."""

_KINDS: Mapping[type[AutoencoderConfig], VAEKind] = {
    HunyuanVAEConfig: VAEKind.HUNYUAN,
    DCAEConfig: VAEKind.DC_AE,
    FluxAEConfig: VAEKind.FLUX_AE,
}
_WITH_SCALE = re.compile(r"(?P<path>.+):(?P<scale>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)", re.IGNORECASE | re.DOTALL)


class GenerationPrecisionSettings(Section):
    """Precision of generation, in addition to `runtime.dtype`."""

    linear: LinearProducts = Field(
        LinearProducts.EXACT,
        description="Precision of the linear layers in blocks: exact, or int8 (GPU from 8.0) or fp8 (from 8.9).",
    )


class ModelSettings(MMDiTConfig):
    """Name of the model, and sizes of its MMDiT. The defaults describe the released 11B model."""

    name: ModelName = Field(OPEN_SORA_V2, description="Model.")


class VAESettings(HunyuanSizes):
    """Kind, sizes and tiling of the autoencoder.

    Keys beside `kind` and the two tilings belong to the causal autoencoder `hunyuan`. Other kinds have sections. The
    defaults describe the released autoencoders.
    """

    kind: VAEKind = Field(VAEKind.HUNYUAN, description="Autoencoder: hunyuan, dc_ae or flux_ae.")
    spatial_tiling: bool = Field(True, description="Encode and decode in spatial tiles.")
    temporal_tiling: bool = Field(False, description="Encode and decode in temporal tiles, for flux_ae of one frame.")
    dc_ae: DCAEConfig = Field(DCAEConfig(), description="Sizes and tiles of kind dc_ae.")
    flux_ae: FluxAEConfig = Field(FluxAEConfig(), description="Sizes and tiles of kind flux_ae.")

    @cached_property
    def sizes(self) -> AutoencoderConfig:
        """Sizes and tiles of the chosen kind."""
        if self.kind is VAEKind.HUNYUAN:
            return HunyuanVAEConfig(**{name: getattr(self, name) for name in HunyuanVAEConfig.model_fields})
        return self.dc_ae if self.kind is VAEKind.DC_AE else self.flux_ae

    @property
    def grid(self) -> LatentGrid:
        """Mapping from frames and pixels to latents of the chosen kind."""
        return self.sizes.grid

    @property
    def scale(self) -> tuple[str, ...]:
        """Settings of the latents' scale as `KEY=VALUE`."""
        if self.kind is VAEKind.DC_AE:
            factor = self.dc_ae.scaling_factor
            return (f"vae.dc_ae.scaling_factor={'none' if factor is None else factor}",)
        section, key = (self.flux_ae, "vae.flux_ae") if self.kind is VAEKind.FLUX_AE else (self, "vae")
        return f"{key}.scale_factor={section.scale_factor}", f"{key}.shift_factor={section.shift_factor}"


def channel_problems(model: ModelSettings, grid: LatentGrid) -> Iterator[str]:
    """Yield a line if the transformer does not read the channels of the latents."""
    channels = grid.latent_channels * model.patch_size**2
    if model.in_channels != channels:
        yield (
            f"model.in_channels={model.in_channels} must be the autoencoder's latent channels "
            f"({grid.latent_channels}) x model.patch_size={model.patch_size} squared: use {channels}"
        )


def settings_of(model: str) -> dict[str, Any]:
    """Return the settings of generation in the entry of a model, nested."""
    entry = ARCHITECTURES[model]
    sizes, kind = entry.autoencoder.model_dump(), _KINDS[type(entry.autoencoder)]
    vae = {"kind": kind.value, "spatial_tiling": entry.spatial_tiling, "temporal_tiling": entry.temporal_tiling}
    found = {
        "model": {"name": model, **entry.transformer.model_dump()},
        "vae": vae | (sizes if kind is VAEKind.HUNYUAN else {kind.value: sizes}),
        "text": entry.text.model_dump(),
        "files": entry.files.model_dump(),
    }
    return nested(entry.defaults, into=found)


class LoraFile(Section):
    """Adapter that is added to the transformer."""

    path: FileName = Field(description="PEFT folder, or .safetensors file in any common style.")
    scale: float = Field(1.0, ge=-100, le=100, description="Strength. A negative value subtracts the adapter.")
    sha256: str | None = Field(None, description="Hash of the adapter in an earlier run, checked if set.")

    @model_validator(mode="before")
    @classmethod
    def _read_typed(cls, value: object) -> object:
        """Read `FILE[:SCALE]`. A path that ends in a colon and a number needs a scale."""
        if not isinstance(value, str):
            return value
        match = _WITH_SCALE.fullmatch(value.strip())
        return match.groupdict() if match else {"path": value.strip()}

    @property
    def shown(self) -> str:
        """Adapter in its typed form."""
        if self.scale == 1 and _WITH_SCALE.fullmatch(self.path) is None:
            return self.path
        return f"{self.path}:{str(self.scale).removesuffix('.0')}"


LoraFiles = Annotated[tuple[LoraFile, ...], SplitAt(";")]
