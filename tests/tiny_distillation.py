"""Small distillations of the demo, and random adapters."""

from pathlib import Path
from typing import Any

import tiny_training
import torch

from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.batches import ClipBatch, ClipRequest
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.objectives import find_objective
from opensora_cli.settings.layers import Given
from opensora_cli.settings.train import TrainSettings, load_train_settings


def settings_of(output: Path, **changes: object) -> TrainSettings:
    """Return a small distillation of the demo; keys of `changes` have `__` for the dot."""
    given = {
        "output": str(output),
        "device": "cpu",
        "lora.rank": 4,
        "data.table": tiny_training.TABLE,
        "data.buckets": "{32px: {9: [1.0, 2]}}",
        "data.workers": 0,
        "train_mmdit.cache": "none",
        "train_mmdit.frozen_dtype": "float32",
        "train_mmdit.attention": "sdpa",
        "train_mmdit.video_latent_frames": 1,
        "train_mmdit.mode_weights.v2v_head_easy": 0,
        "train_mmdit.mode_weights.v2v_tail_easy": 0,
        "train_distill.steps": 2,
        "train_distill.teacher_steps": 2,
        "optimizer.learning_rate": 0.01,
        "optimizer.warmup_steps": 0,
        "loop.steps": 3,
        "loop.ema_decay": "none",
        "loop.log_every": 1,
        "precision.compute": "fp32",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    overrides = {key: Given(value, "test") for key, value in given.items()}
    return load_train_settings(config=Path("demo_distill"), overrides=overrides, environment={})


def new_task(settings: TrainSettings) -> Any:
    """Return the task of a run, whose new adapters change nothing."""
    return find_objective(settings).build(
        settings,
        distribution=Distribution(torch.device("cpu")),
        clips=None,
        token_weights=None,
        reporter=SilentReporter(),
    )


def random_task(settings: TrainSettings) -> Any:
    """Return the task of a run with random adapters."""
    made = new_task(settings)
    generator = torch.Generator().manual_seed(0)
    for name, weight in made.module.named_parameters():
        if ".lora_B." in name:
            weight.data.normal_(std=0.05, generator=generator)
    return made


def batch() -> ClipBatch:
    """Return a micro-batch of two random clips."""
    pixels = torch.randint(0, 256, (2, 9, 32, 32, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return ClipBatch(
        number=0,
        epoch=0,
        cached=None,
        requests=tuple(
            ClipRequest(path=path, caption=caption, num_frames=9, height=32, width=32, fps=12.0)
            for path, caption in (("a.mp4", "a red boat on the sea"), ("b.mp4", "snowing, city"))
        ),
        pixels_BTHWC=pixels,
    )
