"""Small distillations of the demo, and random adapters."""

from pathlib import Path
from typing import Any

import tiny_training
import torch

from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.batches import ClipBatch, ClipRequest
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.objectives import find_objective
from opensora_cli.settings.train import TrainSettings


def settings_of(output: Path, **changes: object) -> TrainSettings:
    """Return a small distillation of the demo; keys of `changes` have `__` for the dot."""
    given = {
        "lora__rank": 4,
        "data__buckets": "{32px: {9: [1.0, 2]}}",
        "train_mmdit__video_latent_frames": 1,
        "train_mmdit__mode_weights__v2v_head_easy": 0,
        "train_mmdit__mode_weights__v2v_tail_easy": 0,
        "train_distill__steps": 2,
        "train_distill__teacher_steps": 2,
        "loop__steps": 3,
        "loop__ema_decay": "none",
    }
    return tiny_training.demo_settings("demo_distill", output, **{**given, **changes})


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
