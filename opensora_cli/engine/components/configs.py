"""From settings to the transformer's configuration, and the parameters of every component."""

from dataclasses import replace
from functools import lru_cache

from torch import nn

from opensora_cli.engine.components.autoencoders import autoencoder_on_meta
from opensora_cli.engine.components.on_meta import on_meta
from opensora_cli.engine.components.weights import Component, WeightFiles
from opensora_cli.models.mmdit import MMDiT, MMDiTConfig
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.settings.components import ModelSettings, VAESettings
from opensora_cli.settings.generate import GenerateSettings


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
        predicts_data=settings.predicts_data,
        cond_embed=settings.cond_embed,
        patch_size=settings.patch_size,
    )


def transformer_on_meta(settings: ModelSettings) -> MMDiT:
    """Return the transformer without weights; RequestError where its sizes contradict each other."""
    with on_meta():
        return MMDiT(mmdit_config(settings))


def with_depth(config: MMDiTConfig, most: int) -> MMDiTConfig:
    """Return the sizes of a transformer with at most so many blocks in each stack."""
    return replace(config, depth=min(config.depth, most), depth_single_blocks=min(config.depth_single_blocks, most))


@lru_cache(maxsize=16)
def one_block_of_each(config: MMDiTConfig) -> MMDiT:
    """Return the transformer without weights, and with at most one block in each stack."""
    with on_meta():
        return MMDiT(with_depth(config, 1))


def count_parameters(settings: GenerateSettings, weights: WeightFiles) -> dict[Component, int]:
    """Return the parameters of every component; no weight is read.

    Text encoders that are not there yet are taken for the released ones. Contradicting sizes are a RequestError, a
    broken text encoder's configuration a CheckpointError.
    """
    return {
        Component.TRANSFORMER: _count_transformer(settings.model),
        Component.VAE: _count_vae(settings.vae),
        Component.T5: T5Sizes.of(weights.paths.get(Component.T5)).parameters,
        Component.CLIP: ClipSizes.of(weights.paths.get(Component.CLIP)).parameters,
    }


# Plans are made several times for one run.
@lru_cache(maxsize=16)
def _count_transformer(settings: ModelSettings) -> int:
    config = mmdit_config(settings)
    model = one_block_of_each(config)
    blocks = [
        (stack.count, model.get_submodule(f"{stack.module_path}.0")) for stack in repeated_blocks(config) if stack.count
    ]
    return _count(model) + sum((count - 1) * _count(block) for count, block in blocks)


@lru_cache(maxsize=16)
def _count_vae(settings: VAESettings) -> int:
    return _count(autoencoder_on_meta(settings))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
