"""Whole trainings by other optimizers and in other precisions: an autoencoder, in small."""

import json
from pathlib import Path

import pytest
import tiny_training

from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.train import run as train_run
from opensora_cli.engine.train.early import Resume
from opensora_cli.engine.train.run import train

ADAMW = {"optimizer.name": "adamw", "optimizer.warmup_steps": 1, "optimizer.decay_steps": 0}


def run(output: Path, *, resume: Resume | None = None, **changes: object) -> dict[str, bytes]:
    """Train, and return the exported weights."""
    settings = tiny_training.vae_settings(output).replace({**ADAMW, **changes})
    result = train(settings, resume=resume)
    return {export.name: export.read_bytes() for export in result.exports}


def log(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def test_a_cosine_ends_low(tmp_path):
    run(tmp_path, **{"optimizer.schedule": "cosine", "optimizer.final_learning_rate": 1e-4})
    rates = [line["learning_rate"] for line in log(tmp_path)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-4 + 9e-4 * 0.75, 1e-4 + 9e-4 * 0.25])


@pytest.mark.parametrize(("compute", "multiplies"), [("bf16", False), ("bf16", True), ("fp32", False)])
def test_a_cpu_that_is_slow_at_what_was_chosen_is_named(tmp_path, monkeypatch, compute, multiplies):
    monkeypatch.setattr(train_run, "multiplies_bf16", lambda device: multiplies)
    reporter, warned = SilentReporter(), []
    reporter.warn = warned.append
    settings = tiny_training.vae_settings(tmp_path).replace({"loop.steps": 1, "precision.compute": compute})
    train(settings, reporter=reporter)
    told = ["use --set precision.compute=fp32" in line for line in warned]
    assert told == ([True] if compute == "bf16" and not multiplies else [])
