"""The files of a training run: what it keeps in its folder, exports to it, and takes from earlier runs."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from opensora_cli.checkpoint.folders import TRAINING_FILE
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.settings.train import TrainTarget

CHECKPOINT_FILE = TRAINING_FILE
LOG_FILE = "log.jsonl"
SETTINGS_FILE = "settings.json"

VAE_FILE = "vae.safetensors"
T5_FOLDER = "t5"
CLIP_FOLDER = "clip"
VOCABULARY_FILE = "vocabulary.json"
TRANSFORMER_FILE = "transformer.safetensors"

EXPORTS: dict[TrainTarget, tuple[str, ...]] = {
    TrainTarget.VAE: (VAE_FILE,),
    TrainTarget.TEXT: (T5_FOLDER, CLIP_FOLDER, VOCABULARY_FILE),
    TrainTarget.MMDIT: (TRANSFORMER_FILE,),
}
"""What a finished run leaves for generating, and for other runs."""

FROZEN_PARTS: dict[TrainTarget, tuple[str, ...]] = {
    TrainTarget.VAE: (),
    TrainTarget.TEXT: (),
    TrainTarget.MMDIT: (VAE_FILE, T5_FOLDER, CLIP_FOLDER),
}
"""What a run needs from the folders in `weights`."""


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, whole or not at all.

    Raises:
        OutputError: that is not possible.
    """
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})
    write_bytes_atomic(path, content)
