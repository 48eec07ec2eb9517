"""Training runs in small, on the clips in tests/clips, for the tests of the engine and those of the command line."""

import json
import signal
from pathlib import Path
from typing import Any

from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.train.plan import RankMemory
from opensora_cli.settings.layers import Given
from opensora_cli.settings.train import TrainSettings, load_train_settings

WIDTH = 16
MAX_LENGTH = 12
TABLE = str(Path(__file__).parent / "clips" / "table.csv")
"""Eight clips of 13 frames, 24 x 58 pixels: the shape with the most tokens of the bucket 32px."""
HELD_OUT = str(Path(__file__).parent / "clips" / "held_out.csv")
SAMPLE_SIZE = {"samples.num_frames": 13, "samples.height": 32, "samples.width": 32}

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
_TEXT = {"t5_max_length": MAX_LENGTH, "clip_max_length": MAX_LENGTH}
_OPTIMIZER = {"name": "muon", "warmup_steps": 1, "decay_steps": 2}
_LOOP = {"steps": 4, "log_every": 1}


def buckets(num_frames: int = 13, *, batch_size: int = 2, size: int = 32) -> dict[str, dict[int, tuple[float, int]]]:
    """Return `data.buckets` of clips of one kind."""
    return {f"{size}px": {num_frames: (1.0, batch_size)}}


def table_of(count: int, folder: Path) -> str:
    head, *rows = Path(TABLE).read_text(encoding="utf-8").splitlines()
    path = folder / f"{count}_clips.csv"
    path.write_text("\n".join([head, *(f"{Path(TABLE).parent}/{row}" for row in rows[:count])]), encoding="utf-8")
    return str(path)


def vae_settings(output: Path) -> TrainSettings:
    """Four steps on clips of five frames."""
    return _settings(
        "vae",
        output,
        data={"table": TABLE, "buckets": buckets(5, batch_size=1), "workers": 0},
        vae=_VAE,
        train_vae={"squared_error_weight": 4.0, "kl_weight": 1e-4, "export_half": True},
    )


def mmdit_settings(output: Path, *weights: Path) -> TrainSettings:
    """All eight modes on clips of three latent frames."""
    return _settings(
        "mmdit",
        output,
        weights=[str(folder) for folder in weights],
        data={"table": TABLE, "buckets": buckets(), "workers": 0},
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


def demo_settings(config: str, output: Path, **changes: object) -> TrainSettings:
    """Return a recipe of the demo on the clips, in float32; keys of `changes` have `__` for the dot."""
    given = {
        "output": output,
        "device": "cpu",
        "data.table": TABLE,
        "data.workers": 0,
        "train_mmdit.cache": "none",
        # In bfloat16 they are slow on a CPU.
        "train_mmdit.frozen_dtype": "float32",
        "train_mmdit.attention": "sdpa",
        "optimizer.learning_rate": 0.01,
        "optimizer.warmup_steps": 0,
        "loop.log_every": 1,
        "precision.compute": "fp32",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    overrides = {key: Given(str(value), "test") for key, value in given.items()}
    return load_train_settings(config=Path(config), overrides=overrides, environment={})


def log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in log(run) if "event" not in line]


class StopAfter(SilentReporter):
    """Presses Ctrl-C when so many units of progress are done."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def advance(self, amount: int = 1) -> None:
        self._left -= amount
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)


def rank_memory(num_bytes: int = 0) -> RankMemory:
    """Return the estimate of a rank, which takes seconds to make."""
    return RankMemory(at_peak={}, peak_bytes=num_bytes, device_peak_bytes=num_bytes, mapped_bytes=0)
