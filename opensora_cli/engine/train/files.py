"""Files of a training run: records, exports and first weights. This module does not need torch."""

from pathlib import Path

from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.encode.inputs import PACKAGED
from opensora_cli.settings.train import TrainSettings, TrainTarget

LOG_FILE = "log.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
PROFILE_FOLDER = "profile"
SAMPLES_FOLDER = "samples"

VAE_FILE = "vae.safetensors"
TRANSFORMER_FILE = "transformer.safetensors"

LORA_FOLDER = "lora"


def first_weights_of(settings: TrainSettings) -> Path | None:
    """Return the file or folder of a run's first weights, which may not exist. None means random weights."""
    if settings.init != PACKAGED:
        return None if settings.init is None else Path(settings.init)
    return packaged_demo() / (VAE_FILE if settings.target is TrainTarget.VAE else TRANSFORMER_FILE)


def exports(settings: TrainSettings) -> tuple[str, ...]:
    """Return the names of a finished run's exports, for generation and for other runs."""
    if settings.lora.is_on:
        return (LORA_FOLDER,)
    return (VAE_FILE if settings.target is TrainTarget.VAE else TRANSFORMER_FILE,)
