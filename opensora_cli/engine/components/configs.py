"""Transformer from settings: configuration, the module without weights, and parameter counts of all parts."""

from functools import lru_cache

from torch import nn

from opensora_cli.engine.components.autoencoders import autoencoder_on_meta
from opensora_cli.engine.components.on_meta import on_meta
from opensora_cli.engine.components.weights import Component, WeightFiles
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.settings.components import ModelSettings, VAESettings
from opensora_cli.settings.generate import GenerateSettings


def mmdit_config(settings: ModelSettings) -> MMDiTConfig:
    """Return the configuration of the transformer."""
    return MMDiTConfig(**{name: getattr(settings, name) for name in MMDiTConfig.model_fields})


def transformer_on_meta(settings: ModelSettings) -> MMDiT:
    """Return the transformer without weights."""
    with on_meta():
        return MMDiT(mmdit_config(settings))


def with_depth(config: MMDiTConfig, most: int) -> MMDiTConfig:
    """Return the configuration with at most `most` blocks in each stack."""
    return config.replace(
        {"depth": min(config.depth, most), "depth_single_blocks": min(config.depth_single_blocks, most)}
    )


@lru_cache(maxsize=16)
def one_block_of_each(config: MMDiTConfig) -> MMDiT:
    """Return the transformer without weights, with at most one block in each stack."""
    with on_meta():
        return MMDiT(with_depth(config, 1))


def count_parameters(settings: GenerateSettings, weights: WeightFiles) -> dict[Component, int]:
    """Return the number of parameters of every component; no weight is read.

    A missing text encoder counts as the released one. Raises CheckpointError if the configuration of a text encoder is
    broken.
    """
    return {
        Component.TRANSFORMER: _count_transformer(settings.model),
        Component.VAE: _count_vae(settings.vae),
        Component.T5: T5Sizes.of(weights.paths.get(Component.T5)).parameters,
        Component.CLIP: ClipSizes.of(weights.paths.get(Component.CLIP)).parameters,
    }


# One run is planned several times.
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
