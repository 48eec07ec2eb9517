"""Training runs in small, for the tests of the engine and for those of the command line: seconds for all three."""

import signal
from pathlib import Path

from opensora_cli.core.progress import SilentReporter
from opensora_cli.settings.train import TrainSettings

WIDTH = 16
MAX_LENGTH = 12

_VAE = {
    "latent_channels": 4,
    "block_out_channels": (4, 8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "sample_size": 32,
    "sample_tsize": 16,
    "scale_factor": 1.0,
    "spatial_compression_ratio": 4,
    "spatial_tiling": False,
}
_MODEL = {
    "name": "demo",
    "in_channels": 16,
    "vec_in_dim": WIDTH,
    "context_in_dim": WIDTH,
    "hidden_size": 32,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": (4, 6, 6),
    "patch_size": 2,
    "predicts_data": False,
}
_TEXT = {
    f"{name}_{size}": value
    for name in ("t5", "clip")
    for size, value in (("width", WIDTH), ("layers", 1), ("heads", 2), ("max_length", MAX_LENGTH))
}
_OPTIMIZER = {"name": "muon", "warmup_steps": 1, "decay_steps": 2}
_LOOP = {"steps": 4, "log_every": 1}


def vae_settings(output: Path) -> TrainSettings:
    """Two steps on pictures, two on clips of five frames."""
    return _settings(
        "vae",
        output,
        data={"scenes": {"count": 8, "size": 32, "num_frames": 5, "batch_size": 2}, "workers": 0},
        vae=_VAE,
        train_vae={
            "picture_steps": 2,
            "picture_batch_size": 2,
            "squared_error_weight": 4.0,
            "kl_weight": 1e-4,
            "whitening_clips": 3,
            "export_half": True,
        },
    )


def text_settings(output: Path) -> TrainSettings:
    """Encoders of one layer."""
    return _settings("text", output, text={**_TEXT, "batch_size": 2})


def mmdit_settings(output: Path, *weights: Path) -> TrainSettings:
    """All eight modes on clips of three latent frames."""
    return _settings(
        "mmdit",
        output,
        weights=[str(folder) for folder in weights],
        data={"scenes": {"count": 8, "size": 32, "num_frames": 13, "batch_size": 2}, "workers": 0},
        model=_MODEL,
        vae=_VAE,
        text=_TEXT,
        train_mmdit={"video_latent_frames": 1, "easy_latent_frames": 2},
    )


def _settings(target: str, output: Path, **sections: object) -> TrainSettings:
    return TrainSettings.model_validate(
        {
            "target": target,
            "output": str(output),
            "device": "cpu",
            "optimizer": _OPTIMIZER,
            "loop": _LOOP,
            **sections,
        }
    )


class StopAfter(SilentReporter):
    """Presses Ctrl-C when so many units of progress are done."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def advance(self, amount: int = 1) -> None:
        self._left -= amount
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)
