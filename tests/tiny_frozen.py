"""Random frozen parts for `tiny_training.mmdit_settings`: nothing needs to be trained first."""

from pathlib import Path

import tiny_training
import tiny_world
import torch

from opensora_cli.engine.components.architectures import new_autoencoder


def save_frozen_parts(folder: Path) -> Path:
    """Write an autoencoder and both text encoders to a folder, and return it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = new_autoencoder(tiny_training.mmdit_settings(folder).vae)
        tiny_world.save_weights(folder / "vae.safetensors", vae)
        tiny_world.save_t5(folder / "t5")
        tiny_world.save_clip(folder / "clip")
    return folder
