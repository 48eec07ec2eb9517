"""From settings to the transformer's configuration, and the parameters of every component."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from opensora_cli.engine.components.autoencoders import video_autoencoder_on_meta
from opensora_cli.engine.components.weights import Component, WeightFiles
from opensora_cli.models.mmdit import MMDiT, MMDiTConfig
from opensora_cli.models.text.folder import blamed
from opensora_cli.settings.components import ModelSettings, VAESettings
from opensora_cli.settings.generate import GenerateSettings

# The released text encoders, for plans that are made before they are downloaded.
_RELEASED_PARAMETERS = {Component.T5: 4_762_310_656, Component.CLIP: 123_060_480}


def mmdit_config(settings: ModelSettings) -> MMDiTConfig:
    """Return the transformer's sizes; a RequestError if they contradict each other."""
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


def transformer_on_meta(settings: ModelSettings) -> MMDiT:
    """Return the transformer without weights; RequestError where its sizes contradict each other."""
    with torch.device("meta"):
        return MMDiT(mmdit_config(settings))


def count_parameters(settings: GenerateSettings, weights: WeightFiles) -> dict[Component, int]:
    """Return the parameters of every component; no weight is read.

    Text encoders that are not there yet are taken for the released ones. Contradicting sizes are a RequestError, a
    broken text encoder's configuration a CheckpointError.
    """
    return {
        Component.TRANSFORMER: _count_transformer(settings.model),
        Component.VAE: _count_vae(settings.vae),
        Component.T5: _count_text(Component.T5, weights.paths.get(Component.T5)),
        Component.CLIP: _count_text(Component.CLIP, weights.paths.get(Component.CLIP)),
    }


# Plans are made several times for one run.
@lru_cache(maxsize=16)
def _count_transformer(settings: ModelSettings) -> int:
    return _count(transformer_on_meta(settings))


@lru_cache(maxsize=16)
def _count_vae(settings: VAESettings) -> int:
    return _count(video_autoencoder_on_meta(settings))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count_text(component: Component, folder: Path | None) -> int:
    if folder is None:
        return _RELEASED_PARAMETERS[component]
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    with blamed(f"{folder / 'config.json'} does not describe a text encoder"), torch.device("meta"):
        if component is Component.T5:
            return _count(T5EncoderModel(T5Config.from_pretrained(str(folder), local_files_only=True)))
        return _count(CLIPTextModel(CLIPTextConfig.from_pretrained(str(folder), local_files_only=True)))
