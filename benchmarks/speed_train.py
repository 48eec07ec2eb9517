"""Part of `speed.py` about training: a step of the trainer with all features against a step of a plain loop."""

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from plain_loop import PlainLoop
from speed_pairs import Row, compared

from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.batches import ClipBatch
from opensora_cli.engine.encode.encoders import EmptyPrompt
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.metrics import Metrics
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.settings.train import TrainSettings
from train import FixedBatches, demo_settings, encoded_batches, make_trainer

GOAL = 1 / 1.01
"""Required speedup: at most a hundredth slower."""
_CPU = torch.device("cpu")
_RELEASED = {
    "model.hidden_size": "3072",
    "model.num_heads": "24",
    "model.axes_dim": "16,56,56",
    "model.depth": "0",
    "model.depth_single_blocks": "1",
}
"""Settings of a block with the released width. Weights, gradients, moments and averages of both loops are 5 GB."""


def measure_train(options: argparse.Namespace) -> Iterator[Row]:
    """Yield rows for a step of the demo, a step of a block of the released width, and the demo compiled and eager.

    Clips are encoded already. The trainer clips, averages, checks for finite values, records times, and writes each
    step to its log and to TensorBoard; the plain loop clips and averages.
    """
    for name, batch_size, model in (("demo", 8, {}), ("released width, one block", 1, _RELEASED)):
        with _watched(batch_size, model) as (step, trainer, batches, empty):
            # There is only one copy of large weights, which both loops train.
            module = trainer.task.module if model else copy.deepcopy(trainer.task.module)
            settings = _settings(batch_size, model)
            plain = PlainLoop(module, batches, empty=empty, settings=settings, device=_CPU)
            yield compared(f"training step, {name}", plain.step, step, pairs=options.pairs, goal=GOAL)
    with _watched(8, {}) as (eager, *_), _watched(8, {"compile": "true"}) as (compiled, *_):
        yield compared("training step, demo, compiled", eager, compiled, pairs=options.pairs)


@contextmanager
def _watched(
    batch_size: int, changes: Mapping[str, str]
) -> Iterator[tuple[Callable[[], object], Trainer, list[ClipBatch], EmptyPrompt]]:
    """Yield a recorded step, its trainer with all features, its micro-batches, and the empty prompt."""
    settings = _settings(batch_size, changes)
    batches, empty = _encoded(batch_size)
    with tempfile.TemporaryDirectory() as folder:
        metrics = Metrics(settings, distribution=Distribution(_CPU), output=Path(folder), reporter=SilentReporter())
        trainer = make_trainer(settings, FixedBatches(batches), _CPU, metrics=metrics)
        metrics.start(0)
        try:
            yield lambda: metrics.on_step(trainer.do_step()), trainer, batches, empty
        finally:
            metrics.close()


@cache
def _encoded(batch_size: int) -> tuple[list[ClipBatch], EmptyPrompt]:
    return encoded_batches(_settings(batch_size, {}), _CPU)


def _settings(batch_size: int, changes: Mapping[str, str]) -> TrainSettings:
    everything = {"loop.log_every": "1", "watching.tensorboard": "true"}
    return demo_settings(batch_size=batch_size, compute="fp32", changes={**everything, **changes})
