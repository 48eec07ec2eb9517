"""Autoencoders: the one place that names them, from settings and a file of weights.

Generation and its estimate know only `VideoAutoencoder`, the interface: another one is a line in `AUTOENCODERS`.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

import torch

from opensora_cli.checkpoint.load import load_into_module
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.engine.components.weights import DEFAULT_FOLDER, hub_snapshot, packaged_demo
from opensora_cli.models.vae.autoencoder import Autoencoder, VideoAutoencoder
from opensora_cli.models.vae.dc_ae import DCAE, DCAEConfig
from opensora_cli.models.vae.flux_ae import FluxAE, FluxAEConfig
from opensora_cli.models.vae.hunyuan import HunyuanVAE, HunyuanVAEConfig
from opensora_cli.models.vae.tiling import Tiling
from opensora_cli.settings.base import Section
from opensora_cli.settings.components import VAESettings
from opensora_cli.settings.enums import DownloadPreset, VAEKind


@dataclass(frozen=True, slots=True)
class AutoencoderKind:
    """One row of the registry."""

    make: Callable[[VAESettings], Autoencoder]
    """Returns it with random weights; RequestError where its sizes contradict each other."""
    download: DownloadPreset
    """What `osora ckpt download` calls its weights."""


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


AUTOENCODERS: Mapping[VAEKind, AutoencoderKind] = {
    VAEKind.HUNYUAN: AutoencoderKind(
        lambda settings: HunyuanVAE(_hunyuan_config(settings)), DownloadPreset.OPEN_SORA_V2
    ),
    VAEKind.DC_AE: AutoencoderKind(
        lambda settings: DCAE(DCAEConfig(**_fields(settings.dc_ae))), DownloadPreset.OPEN_SORA_V2_DC_AE
    ),
    VAEKind.FLUX_AE: AutoencoderKind(
        lambda settings: FluxAE(FluxAEConfig(**_fields(settings.flux_ae))), DownloadPreset.FLUX1_DEV
    ),
}


def new_autoencoder(settings: VAESettings) -> Autoencoder:
    """Return the chosen autoencoder with random weights, on torch's default device.

    Sizes that contradict each other are a RequestError.
    """
    return AUTOENCODERS[settings.kind].make(settings)


def autoencoder_on_meta(settings: VAESettings) -> Autoencoder:
    """Return the chosen autoencoder without weights; RequestError where its sizes contradict each other."""
    with torch.device("meta"):
        return new_autoencoder(settings)


def new_video_autoencoder(settings: VAESettings) -> VideoAutoencoder:
    """Return `new_autoencoder`'s result for generating videos; a RequestError if it is not made for that."""
    autoencoder = new_autoencoder(settings)
    if not isinstance(autoencoder, VideoAutoencoder):
        raise RequestError(f"vae.kind={settings.kind} is not made for generating: use {VAEKind.HUNYUAN}")
    return autoencoder


def video_autoencoder_on_meta(settings: VAESettings) -> VideoAutoencoder:
    """Return the autoencoder that videos are generated with, without weights; errors as of `new_video_autoencoder`."""
    with torch.device("meta"):
        return new_video_autoencoder(settings)


def vae_tiling(settings: VAESettings) -> Tiling:
    """Return which axes the autoencoder cuts into tiles."""
    return Tiling(spatial=settings.spatial_tiling, temporal=settings.temporal_tiling)


@lru_cache(maxsize=16)
def count_decoder_tiles(latent_shape: tuple[int, int, int, int], settings: VAESettings) -> int:
    """Return how often the decoder runs for latents of this (C, T, H, W)."""
    (_, grid), tiling = video_autoencoder_on_meta(settings).config.tile_grids(), vae_tiling(settings)
    _, frames, rows, columns = latent_shape
    tiles = 1
    if tiling.spatial and max(rows, columns) > grid.space.size:
        tiles *= ceil(rows / grid.space.stride) * ceil(columns / grid.space.stride)
    if tiling.temporal and frames > grid.time.size:
        # The one frame that a tile has more is not a tile of its own.
        tiles *= ceil((frames - 1) / grid.time.stride)
    return tiles


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
    return autoencoder.requires_grad_(False).eval()


def find_autoencoder(kind: VAEKind, file: str, *, hub_repo: str | None, named: str | None) -> Path:
    """Return where the weights of an autoencoder are; a CheckpointError names where they were looked for.

    Args:
        file: the name of its file.
        hub_repo: the Hub repository in whose cache it may be; None: it is the demo's, which is part of osora.
        named: the folder to look in, and in no other; None: `./ckpts`, then the Hugging Face cache.
    """
    if named is not None:
        folders = [Path(named)]
    elif hub_repo is None:
        folders = [packaged_demo()]
    else:
        folders = [folder for folder in (Path(DEFAULT_FOLDER), hub_snapshot(hub_repo)) if folder is not None]
    for folder in folders:
        if (folder / file).exists():
            return folder / file
    hint = None
    if hub_repo is not None:
        place = "" if named is None else f" --to {shlex.quote(named)}"
        hint = f"osora ckpt download {AUTOENCODERS[kind].download}{place}"
    raise CheckpointError(
        f"weights of the autoencoder are missing: {file} (looked in {' and '.join(map(str, folders))})", hint=hint
    )
