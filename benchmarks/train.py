"""Measure the cost of the training loop: its own work, and waiting for data.

    python benchmarks/train.py --json train.json

Two parts run in one process on the demo's transformer, on a GPU if there is one:

- `throughput`: steps of the trainer against steps of the loop in `plain_loop.py`, on the same encoded clips, with the
  same optimizer, precision, clipping and average. They alternate in blocks, and medians over the blocks are compared.
  Both train only text to video. CPU seconds are printed, too, because they depend less on other programs.
- `data`: the share of a step in which the trainer waits for clips that worker processes cut out of MP4 files. The time
  of a step depends on this machine, and includes encoding. The time of reading alone is printed, too.
"""

import argparse
import copy
import csv
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from plain_loop import PlainLoop

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.batches import ClipBatch
from opensora_cli.engine.encode.clips import CachedClip, FreshClip, encode_for_cache
from opensora_cli.engine.encode.datasets import open_batches
from opensora_cli.engine.encode.encoders import EmptyPrompt, load_encoders
from opensora_cli.engine.train.activations import largest_batch_shape
from opensora_cli.engine.train.build import build_task
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.metrics import Metrics
from opensora_cli.engine.train.trainer import BatchSource, Clock, Trainer
from opensora_cli.media.write import write_media
from opensora_cli.settings.explain import Given
from opensora_cli.settings.train import TrainSettings, load_train_settings

SCHEMA = "osora.bench.train/1"
MOST_SLOWER, MOST_WAIT, MOST_STANDSTILL = 0.01, 0.05, 0.1
_BATCHES = 4
_CLIPS, _CLIP_SIZE, _CLIP_FRAMES, _CLIP_FPS = 32, 128, 49, 24.0
_CAPTION = "raining, sea"
_WITHOUT_BF16 = {"train_mmdit.frozen_dtype": "float32", "train_mmdit.attention": "sdpa"}
"""Settings without bfloat16, which takes many times as long on processors without native bfloat16 products."""


def demo_settings(*, batch_size: int, compute: str, changes: Mapping[str, str] | None = None) -> TrainSettings:
    """Return settings to train the demo's transformer from random weights on clips of 9 frames.
    Training uses the packaged frozen parts, AdamW at a constant rate, and only text to video.
    """
    given = {
        "init": "none",
        "lora.rank": "none",
        "data.workers": "0",
        "data.buckets": f"{{128px: {{9: [1.0, {batch_size}]}}}}",
        "precision.compute": compute,
        **(_WITHOUT_BF16 if compute == "fp32" else {}),
        "optimizer.learning_rate": "1e-3",
        "optimizer.warmup_steps": "0",
        "loop.ema_decay": "0.998",
        "train_mmdit.cache": "none",
        **{f"train_mmdit.mode_weights.{mode}": str(int(mode == "t2v")) for mode in CONDITION_MODES},
        **(changes or {}),
    }
    overrides = {key: Given(value, "the benchmark") for key, value in given.items()}
    return load_train_settings(config=Path("demo_lora"), overrides=overrides, environment={})


class FixedBatches:
    """Cycle of a few micro-batches with increasing numbers.

    Args:
        batches: the micro-batches to repeat.
    """

    epoch = 0

    def __init__(self, batches: Sequence[ClipBatch]) -> None:
        self._batches = batches
        self._number = 0

    def next(self) -> ClipBatch:
        """Return the next micro-batch."""
        batch = replace(self._batches[self._number % len(self._batches)], number=self._number)
        self._number += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because no run is resumed."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def color_field(num_frames: int, size: int, number: int) -> torch.Tensor:
    """Return a clip of smooth random colors that change over time: uint8 RGB (num_frames, size, size, 3)."""
    corners_13THW = torch.rand(1, 3, 2, 5, 5, generator=torch.Generator().manual_seed(number))
    shape = (num_frames, size, size)
    levels_13THW = torch.nn.functional.interpolate(corners_13THW, size=shape, mode="trilinear", align_corners=True)
    return (levels_13THW[0] * 255).round().to(torch.uint8).permute(1, 2, 3, 0)


def encoded_batches(settings: TrainSettings, device: torch.device) -> tuple[list[ClipBatch], EmptyPrompt]:
    """Return a few micro-batches like those of a cache, and the empty prompt."""
    encoders = load_encoders(settings, device=device)
    batches = []
    for number in range(_BATCHES):
        shape = largest_batch_shape(settings)
        batch = replace(shape.zeros(), number=number)
        clips = []
        for index, request in enumerate(batch.requests):
            pixels_THWC = color_field(shape.num_frames, _CLIP_SIZE, shape.batch_size * number + index)
            clips.append(FreshClip(encoders, pixels_THWC, replace(request, caption=_CAPTION), settings.train_mmdit))
        cached = tuple(CachedClip(encode_for_cache(clip, {})) for clip in clips)
        batches.append(replace(batch, pixels_BTHWC=None, cached=cached))
    return batches, encoders.empty_prompt


def make_trainer(
    settings: TrainSettings, batches: BatchSource, device: torch.device, *, metrics: Metrics | None = None
) -> Trainer:
    """Return the trainer of `osora train`; without `metrics`, nothing is recorded."""
    distribution = Distribution(device)
    return Trainer(
        build_task(settings, distribution=distribution, reporter=SilentReporter()),
        batches,
        loop=settings.loop,
        optimizer=settings.optimizer,
        compute=settings.precision.compute,
        distribution=distribution,
        clock=Clock() if metrics is None else metrics.clock,
    )


def measure_throughput(
    device: torch.device, *, compute: str, batch_size: int, block: int, rounds: int
) -> dict[str, Any]:
    """Return the median seconds of a step of both loops, their wall-clock and CPU ratios, and the raw values."""
    settings = demo_settings(batch_size=batch_size, compute=compute)
    batches, empty = encoded_batches(settings, device)
    trainer = make_trainer(settings, FixedBatches(batches), device)
    plain = PlainLoop(copy.deepcopy(trainer.task.module), batches, empty=empty, settings=settings, device=device)
    steps: dict[str, Callable[[], object]] = {"trainer": trainer.do_step, "plain": plain.step}
    walls: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        _seconds(step, 2, device)
    for index in range(rounds):
        # The order changes with each round.
        for name in list(steps)[:: 1 if index % 2 == 0 else -1]:
            wall, cpu = _seconds(steps[name], block, device)
            walls[name].append(wall)
            processor[name].append(cpu)
    return {
        "compute": compute,
        "trainer_s": median(walls["trainer"]),
        "plain_s": median(walls["plain"]),
        "slower": median(walls["trainer"]) / median(walls["plain"]) - 1,
        "slower_processor": median(processor["trainer"]) / median(processor["plain"]) - 1,
        "blocks_s": walls,
        "blocks_processor_s": processor,
    }


def _seconds(step: Callable[[], object], count: int, device: torch.device) -> tuple[float, float]:
    """Return the wall-clock and CPU seconds of a step, averaged over `count` steps."""
    _finish(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    _finish(device)
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write_clips(folder: Path) -> Path:
    """Write clips of moving colors as MP4 files, and return their table."""
    table = folder / "clips.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "text", "num_frames", "height", "width", "fps"])
        for number in range(_CLIPS):
            path = folder / f"{number}.mp4"
            frames_THWC = color_field(_CLIP_FRAMES, _CLIP_SIZE, number)
            write_media([frames_THWC], path, fps=_CLIP_FPS, format="mp4")
            rows.writerow([path.name, _CAPTION, _CLIP_FRAMES, _CLIP_SIZE, _CLIP_SIZE, _CLIP_FPS])
    return table


def measure_data(
    folder: Path, device: torch.device, *, batch_size: int, steps: int, workers: int
) -> dict[str, float | int]:
    """Return the share of waiting, the median seconds of a step, and of reading a micro-batch in one process."""
    files = {
        "data.table": str(write_clips(folder)),
    }
    settings = demo_settings(batch_size=batch_size, compute="bf16" if device.type == "cuda" else "fp32", changes=files)
    alone = open_batches(settings, data_rank=0, data_ranks=1, reporter=SilentReporter())
    reading = median(_seconds(alone.next, 1, torch.device("cpu"))[0] for _ in range(4))
    settings = settings.replace({"data.workers": workers})
    batches = open_batches(settings, data_rank=0, data_ranks=1, reporter=SilentReporter())
    try:
        trainer = make_trainer(settings, batches, device)
        for _ in range(2):
            trainer.do_step()
        seconds = [trainer.do_step().seconds for _ in range(steps)]
    finally:
        batches.close()
    return {
        "workers": workers,
        "steps": steps,
        "step_s": median(each["total"] for each in seconds),
        "reading_alone_s": reading,
        "wait": sum(each["data"] for each in seconds) / sum(each["total"] for each in seconds),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    load = os.getloadavg()[0]
    throughput = [
        measure_throughput(
            device, compute=compute, batch_size=options.batch_size, block=options.block, rounds=options.rounds
        )
        for compute in (("fp32", "bf16") if device.type == "cuda" else ("fp32",))
    ]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        data = measure_data(
            Path(folder), device, batch_size=options.batch_size, steps=options.data_steps, workers=options.workers
        )
    return {
        "schema": SCHEMA,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": load,
        "batch_size": options.batch_size,
        "throughput": throughput,
        "data": data,
    }


def table(figures: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether all limits are met."""
    rows = [
        (
            f"trainer against a plain loop, {each['compute']}",
            f"{each['trainer_s']:.4f} s and {each['plain_s']:.4f} s a step; processor {each['slower_processor']:+.1%}",
            each["slower"],
            MOST_SLOWER,
        )
        for each in figures["throughput"]
    ]
    data = figures["data"]
    rows.append(
        (
            f"waiting for data, {data['workers']} workers",
            f"a step takes {data['step_s']:.3f} s, reading alone {data['reading_alone_s']:.3f} s",
            data["wait"],
            MOST_WAIT,
        )
    )
    head = f"{'':41} {'found':>7} {'at most':>8}"
    lines = [f"{name:41} {value:>7.1%} {most:>8.0%}   {found}" for name, found, value, most in rows]
    return [head, *lines], all(value <= most for _, _, value, most in rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="what the training loop costs")
    parser.add_argument("--batch-size", type=int, default=8, help="clips of a step")
    parser.add_argument("--block", type=int, default=5, help="steps of the trainer, and then of the plain loop")
    parser.add_argument("--rounds", type=int, default=12, help="blocks of each")
    parser.add_argument("--data-steps", type=int, default=30, help="steps on MP4 files")
    parser.add_argument("--workers", type=int, default=2, help="processes that read them")
    parser.add_argument("--folder", type=Path, help="where files go; default: the system's folder for temporary files")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and return 1 if a limit is exceeded."""
    options = parse(arguments)
    figures = measure(options)
    lines, is_fine = table(figures)
    print("\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
