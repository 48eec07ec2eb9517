"""Measures how long training stands still for a checkpoint: saved in the background, and waited for.

    python benchmarks/checkpoint_stall.py --mib 512 --out checkpoint_stall.json

One process saves weights, averages and moments again and again: `save` returns after the copy, and `wait` when
everything is written, flushed and hashed, which is what a synchronous save would take. The first save, which also
allocates the memory for the copy, is left out.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.train.checkpoints import CheckpointWriter
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.objectives.task import SampledBatches, SampleRng
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.engine.train.watching.clocks import Clock
from opensora_cli.settings.train_loop import CheckpointSettings, Compute, LoopSettings, OptimizerSettings

SCHEMA = "osora.bench.checkpoint-stall/1"
_WIDTH = 1024
_COPIES = 4  # weights, averages, and two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A micro-batch of nothing but its number."""

    number: int
    paths = ()


class _Task:
    """Layers that learn nothing in particular."""

    adversary = None

    def __init__(self, layers: int, device: torch.device) -> None:
        self.module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers))).to(device)
        self.forward = self.module
        self._device = device

    def begin_step(self, step: int, ema: Mapping[str, Tensor] | None) -> None:
        """Do nothing."""

    def loss(self, batch: Numbered, rng: SampleRng) -> tuple[Tensor, dict[str, float]]:
        """Return a loss of one row of noise."""
        noise = torch.randn(1, _WIDTH, generator=rng.torch).to(self._device)
        return self.forward(noise).square().mean(), {}

    def tokens(self, batch: Numbered) -> int:
        """Return 1."""
        return 1

    def samples(self, batch: Numbered) -> int:
        """Return 1."""
        return 1

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Do nothing."""


def make_trainer(mib: int, device: torch.device) -> Trainer[Numbered]:
    """Return a trainer whose state has about `mib` MiB, after a step that makes the moments."""
    layers = max(1, mib * 2**20 // (_COPIES * 4 * _WIDTH**2))
    distribution = Distribution(device)
    trainer = Trainer(
        _Task(layers, device),
        SampledBatches(lambda rng, number: Numbered(number=number), seed=0),
        loop=LoopSettings(steps=10**6),
        optimizer=OptimizerSettings(),
        compute=Compute.FP32,
        distribution=distribution,
        clock=Clock(),
        reporter=SilentReporter(),
    )
    trainer.do_step()
    return trainer


def measure(folder: Path, *, mib: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the medians, and what they are of."""
    trainer = make_trainer(mib, device)
    waited, stood_still = [], []
    with CheckpointWriter(folder, CheckpointSettings(keep=1, keep_best=False)) as writer:
        writer.save(trainer)
        writer.wait()
        for _ in range(rounds):
            trainer.do_step()
            start = time.perf_counter()
            writer.save(trainer)
            stood_still.append(time.perf_counter() - start)
            writer.wait()
            waited.append(time.perf_counter() - start)
        (newest,) = folder.iterdir()
        size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    return {
        "bytes": size,
        "rounds": rounds,
        "synchronous_s": median(waited),
        "stands_still_s": median(stood_still),
        "share": median(stood_still) / median(waited),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description="how long training stands still for a checkpoint")
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind")
    parser.add_argument("--folder", type=Path, help="where to save; default: the system's folder for temporary files")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print one line, and exit with 1 if it stands still for a tenth of a synchronous save or more."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(Path(folder), mib=options.mib, rounds=options.rounds, device=torch.device("cpu"))
    print(
        f"{figures['bytes'] / 1e6:.0f} MB: {figures['synchronous_s']:.2f} s synchronously, of which training stands "
        f"still for {figures['stands_still_s']:.3f} s ({figures['share']:.1%})"
    )
    if options.out:
        options.out.write_text(json.dumps({"schema": SCHEMA, **figures}, indent=2) + "\n", encoding="utf-8")
    return int(figures["share"] >= 0.1)


if __name__ == "__main__":
    sys.exit(main())
