"""Autoencoders: the one place that names them, from settings and a file of weights.

Generation and its estimate know only `Autoencoder`, the interface: another one is a line in `AUTOENCODERS`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from opensora_cli.checkpoint.load import load_into_module
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import plain
from opensora_cli.engine.components.on_meta import on_meta
from opensora_cli.models.vae.autoencoder import Autoencoder, AutoencoderConfig
from opensora_cli.models.vae.dc_ae import DCAE, DCAEConfig
from opensora_cli.models.vae.flux_ae import FluxAE, FluxAEConfig
from opensora_cli.models.vae.hunyuan import HunyuanVAE, HunyuanVAEConfig
from opensora_cli.models.vae.resample import lay_out_kernels
from opensora_cli.models.vae.tiling import Tiling
from opensora_cli.settings.base import Section
from opensora_cli.settings.components import VAESettings
from opensora_cli.settings.enums import VAEKind


def _hunyuan_config(settings: VAESettings) -> HunyuanVAEConfig:
    return HunyuanVAEConfig(
        latent_channels=settings.latent_channels,
        block_out_channels=settings.block_out_channels,
        layers_per_block=settings.layers_per_block,
        norm_num_groups=settings.norm_num_groups,
        sample_size=settings.sample_size,
        sample_tsize=settings.sample_tsize,
        tile_overlap_factor=settings.tile_overlap_factor,
        scale_factor=settings.scale_factor,
        shift_factor=settings.shift_factor,
        time_compression_ratio=settings.time_compression_ratio,
        spatial_compression_ratio=settings.spatial_compression_ratio,
    )


def _fields(section: Section) -> dict[str, Any]:
    # The sections have the names of the configurations.
    return {name: getattr(section, name) for name in type(section).model_fields}


_SCALE_METADATA = "osora.latent_scale"

AUTOENCODERS: Mapping[
    VAEKind, tuple[type[HunyuanVAE] | type[DCAE] | type[FluxAE], Callable[[VAESettings], AutoencoderConfig]]
] = {
    VAEKind.HUNYUAN: (HunyuanVAE, _hunyuan_config),
    VAEKind.DC_AE: (DCAE, lambda settings: DCAEConfig(**_fields(settings.dc_ae))),
    VAEKind.FLUX_AE: (FluxAE, lambda settings: FluxAEConfig(**_fields(settings.flux_ae))),
}
"""Each, and its sizes."""


def new_autoencoder(settings: VAESettings) -> Autoencoder:
    """Return the chosen autoencoder with random weights, on torch's default device.

    Sizes that contradict each other are a RequestError.
    """
    autoencoder, config = AUTOENCODERS[settings.kind]
    made: Autoencoder = autoencoder(cast(Any, config(settings)))
    return made


def autoencoder_on_meta(settings: VAESettings) -> Autoencoder:
    """Return the chosen autoencoder without weights; RequestError where its sizes contradict each other."""
    with on_meta():
        return new_autoencoder(settings)


def vae_tiling(settings: VAESettings) -> Tiling:
    """Return which axes the autoencoder cuts into tiles."""
    return Tiling(spatial=settings.spatial_tiling, temporal=settings.temporal_tiling)


def scale_metadata(settings: VAESettings) -> dict[str, str]:
    """Return what the file of a transformer says of the latents that it was trained on."""
    return {_SCALE_METADATA: " ".join(settings.scale)}


def require_same_scale(transformer: Path, settings: VAESettings) -> None:
    """Raise CheckpointError if a transformer's file says that it was trained on latents of another scale."""
    if transformer.suffix != ".safetensors" or not transformer.is_file():
        return
    stated, ours = open_checkpoint(transformer).metadata.get(_SCALE_METADATA), " ".join(settings.scale)
    if stated is not None and stated != ours:
        raise CheckpointError(
            f"{transformer} was trained on latents with {plain(stated)}, and here they have {ours}",
            hint=f"use {' '.join(f'--set {each}' for each in plain(stated).split())}",
        )


def count_decoder_tiles(latent_shape: tuple[int, int, int, int], settings: VAESettings) -> int:
    """Return how often the decoder runs for latents of this (C, T, H, W)."""
    _, config = AUTOENCODERS[settings.kind]
    _, grid = config(settings).tile_grids()
    return grid.count(latent_shape[1:], vae_tiling(settings))


def decodes_in_chunks(settings: VAESettings) -> bool:
    """Return whether a clip's frames may be decoded piece by piece."""
    autoencoder, _ = AUTOENCODERS[settings.kind]
    return autoencoder.decodes_in_chunks


def load_autoencoder(
    settings: VAESettings,
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    advance: Callable[[int], None] | None = None,
) -> Autoencoder:
    """Return the chosen autoencoder with the weights of a file in `dtype`, for use without training.

    `advance` is called with the bytes of each tensor.

    Raises:
        RequestError: the sizes contradict each other.
        CheckpointError: the file is missing or broken, or its keys or shapes do not fit the settings.
    """
    autoencoder = autoencoder_on_meta(settings)
    load_into_module(autoencoder, path, device=device, dtype=dtype, advance=advance)
    lay_out_kernels(autoencoder, device)
    return autoencoder.requires_grad_(False).eval()
