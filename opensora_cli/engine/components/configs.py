"""From settings to the configurations of the models, and what these weigh."""

from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.engine.components.weights import Component, WeightFiles
from opensora_cli.models.mmdit import MMDiT, MMDiTConfig
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.models.vae.dc_ae import DCAE, DCAEConfig
from opensora_cli.models.vae.flux_ae import FluxAE, FluxAEConfig
from opensora_cli.models.vae.hunyuan import HunyuanVAE, HunyuanVAEConfig
from opensora_cli.models.vae.tiling import Tiling
from opensora_cli.settings.base import Section
from opensora_cli.settings.components import ModelSettings, VAESettings
from opensora_cli.settings.enums import VAEKind
from opensora_cli.settings.generate import GenerateSettings

# The released text encoders, for plans that are made before they are downloaded.
_RELEASED_PARAMETERS = {Component.T5: 4_762_310_656, Component.CLIP: 123_060_480}


def mmdit_config(settings: ModelSettings) -> MMDiTConfig:
    """Return the transformer's sizes.

    Raises:
        RequestError: they contradict each other.
    """
    return MMDiTConfig(
        in_channels=settings.in_channels,
        vec_in_dim=settings.vec_in_dim,
        context_in_dim=settings.context_in_dim,
        hidden_size=settings.hidden_size,
        mlp_ratio=settings.mlp_ratio,
        num_heads=settings.num_heads,
        depth=settings.depth,
        depth_single_blocks=settings.depth_single_blocks,
        axes_dim=settings.axes_dim,
        theta=int(settings.theta),
        qkv_bias=settings.qkv_bias,
        guidance_embed=settings.guidance_embed,
        cond_embed=settings.cond_embed,
        patch_size=settings.patch_size,
    )


def vae_config(settings: VAESettings) -> HunyuanVAEConfig:
    """Return the sizes of the causal autoencoder.

    Raises:
        RequestError: they contradict each other, or another autoencoder is chosen.
    """
    if settings.kind is not VAEKind.HUNYUAN:
        raise RequestError(f"vae.kind={settings.kind} must be {VAEKind.HUNYUAN} here")
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


def new_autoencoder(settings: VAESettings) -> Autoencoder:
    """Return the chosen autoencoder with random weights, on torch's default device.

    Raises:
        RequestError: its sizes contradict each other.
    """
    if settings.kind is VAEKind.DC_AE:
        return DCAE(DCAEConfig(**_fields(settings.dc_ae)))
    if settings.kind is VAEKind.FLUX_AE:
        return FluxAE(FluxAEConfig(**_fields(settings.flux_ae)))
    return HunyuanVAE(vae_config(settings))


def autoencoder_on_meta(settings: VAESettings) -> Autoencoder:
    """Return the chosen autoencoder without weights; RequestError where its sizes contradict each other."""
    with torch.device("meta"):
        return new_autoencoder(settings)


def _fields(section: Section) -> dict[str, Any]:
    # The sections have the names of the configurations.
    return {name: getattr(section, name) for name in type(section).model_fields}


def vae_tiling(settings: VAESettings) -> Tiling:
    """Return which axes the autoencoder cuts into tiles."""
    return Tiling(spatial=settings.spatial_tiling, temporal=settings.temporal_tiling)


def count_decoder_tiles(latent_shape: tuple[int, int, int, int], settings: VAESettings) -> int:
    """Return how often the decoder runs for latents of this (C, T, H, W)."""
    (_, grid), tiling = vae_config(settings).tile_grids(), vae_tiling(settings)
    _, frames, rows, columns = latent_shape
    tiles = 1
    if tiling.spatial and max(rows, columns) > grid.space.size:
        tiles *= ceil(rows / grid.space.stride) * ceil(columns / grid.space.stride)
    if tiling.temporal and frames > grid.time.size:
        # The one frame that a tile has more is not a tile of its own.
        tiles *= ceil((frames - 1) / grid.time.stride)
    return tiles


def transformer_on_meta(settings: ModelSettings) -> MMDiT:
    """Return the transformer without weights; RequestError where its sizes contradict each other."""
    with torch.device("meta"):
        return MMDiT(mmdit_config(settings))


def vae_on_meta(settings: VAESettings) -> HunyuanVAE:
    """Return the causal autoencoder without weights; RequestError as in `vae_config`."""
    with torch.device("meta"):
        return HunyuanVAE(vae_config(settings))


def count_parameters(settings: GenerateSettings, weights: WeightFiles) -> dict[Component, int]:
    """Return the parameters of every component; no weight is read.

    Text encoders that are not there yet are taken for the released ones.

    Raises:
        RequestError: sizes in `settings` contradict each other.
        CheckpointError: a text encoder's configuration is broken.
    """
    return {
        Component.TRANSFORMER: _count(transformer_on_meta(settings.model)),
        Component.VAE: _count(vae_on_meta(settings.vae)),
        Component.T5: _count_text(Component.T5, weights.paths.get(Component.T5)),
        Component.CLIP: _count_text(Component.CLIP, weights.paths.get(Component.CLIP)),
    }


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count_text(component: Component, folder: Path | None) -> int:
    if folder is None:
        return _RELEASED_PARAMETERS[component]
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    try:
        with torch.device("meta"):
            if component is Component.T5:
                return _count(T5EncoderModel(T5Config.from_pretrained(str(folder), local_files_only=True)))
            return _count(CLIPTextModel(CLIPTextConfig.from_pretrained(str(folder), local_files_only=True)))
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder / 'config.json'} does not describe a text encoder: {reason}") from error
