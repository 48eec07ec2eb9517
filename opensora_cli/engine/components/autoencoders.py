"""Autoencoders from settings: built, without weights, or loaded from a file.

Other code knows only the interface `Autoencoder`. A new autoencoder is a line in `AUTOENCODERS`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from opensora_cli.checkpoint.load import load_into_module
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import plain
from opensora_cli.engine.components.on_meta import on_meta
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.models.vae.dc_ae import DCAE
from opensora_cli.models.vae.flux_ae import FluxAE
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.models.vae.resample import lay_out_kernels
from opensora_cli.models.vae.tiles import Tiling
from opensora_cli.settings.components import VAESettings
from opensora_cli.settings.enums import VAEKind

AUTOENCODERS: Mapping[VAEKind, type[Autoencoder]] = {
    VAEKind.HUNYUAN: HunyuanVAE,
    VAEKind.DC_AE: DCAE,
    VAEKind.FLUX_AE: FluxAE,
}

_SCALE_METADATA = "osora.latent_scale"


def new_autoencoder(settings: VAESettings) -> Autoencoder:
    """Return the chosen autoencoder with random weights, on torch's default device."""
    return AUTOENCODERS[settings.kind](settings.sizes)


def autoencoder_on_meta(settings: VAESettings) -> Autoencoder:
    """Return the chosen autoencoder without weights."""
    with on_meta():
        return new_autoencoder(settings)


def load_autoencoder(
    settings: VAESettings,
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    advance: Callable[[int], None] | None = None,
) -> Autoencoder:
    """Return the chosen autoencoder for inference, with the weights of a file in `dtype`.

    `advance` is called with the bytes of each tensor.
    """
    autoencoder = autoencoder_on_meta(settings)
    load_into_module(autoencoder, path, device=device, dtype=dtype, advance=advance)
    lay_out_kernels(autoencoder, device)
    return autoencoder.requires_grad_(False).eval()


def vae_tiling(settings: VAESettings) -> Tiling:
    """Return the axes along which the autoencoder cuts tiles."""
    return Tiling(spatial=settings.spatial_tiling, temporal=settings.temporal_tiling)


def count_decoder_tiles(latent_shape: tuple[int, int, int, int], settings: VAESettings) -> int:
    """Return how often the decoder runs for latents of this (C, T, H, W)."""
    _, grid = settings.sizes.tile_grids()
    return grid.count(latent_shape[1:], vae_tiling(settings))


def decodes_in_chunks(settings: VAESettings) -> bool:
    """Return whether the decoder can process the frames of a clip in chunks."""
    return AUTOENCODERS[settings.kind].decodes_in_chunks


def scale_metadata(settings: VAESettings) -> dict[str, str]:
    """Return the metadata of a transformer's file that states the scale of its training latents."""
    return {_SCALE_METADATA: " ".join(settings.scale)}


def require_same_scale(transformer: Path, settings: VAESettings) -> None:
    """Raise CheckpointError if the metadata of a transformer's file states latents of another scale."""
    if transformer.suffix != ".safetensors" or not transformer.is_file():
        return
    stated, ours = open_checkpoint(transformer).metadata.get(_SCALE_METADATA), " ".join(settings.scale)
    if stated is not None and stated != ours:
        raise CheckpointError(
            f"{transformer} was trained on latents with {plain(stated)}, and the settings have {ours}",
            hint=f"use {' '.join(f'--set {each}' for each in plain(stated).split())}",
        )
