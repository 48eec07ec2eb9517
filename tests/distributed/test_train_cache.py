"""Encoded clips that two processes make side by side, and learn from as one process does."""

from pathlib import Path

import pytest
import tiny_frozen
import tiny_training
import torch
from tiny_world import RecordingReporter

from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.encode.datasets import open_batches
from opensora_cli.engine.train.build import build_task, open_clips_cache
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.parallel.mesh import ParallelMesh
from opensora_cli.parallel.shares import MeshShape

_CLIPS = 8
_MICRO_BATCHES = 4


def _losses(ranks: int, weights: Path, cache: Path | None) -> tuple[int, bool, dict[int, float]]:
    """Return how many clips this rank encoded, whether it hashed files, and losses of micro-batches by number."""
    settings = tiny_training.mmdit_settings(Path("unused"), weights).replace(
        {"train_mmdit.cache": cache and str(cache), "loop.micro_batches": _MICRO_BATCHES}
    )
    device, reporter = torch.device("cpu"), RecordingReporter()
    distribution = Distribution(device)
    if ranks > 1:
        distribution = Distribution(device, ParallelMesh(MeshShape(replicate=ranks), device_type="cpu"))
    clips = open_clips_cache(settings, distribution=distribution, reporter=reporter)
    task = build_task(settings, distribution=distribution, clips=clips, reporter=reporter)
    batches = open_batches(
        settings,
        data_rank=distribution.data_rank,
        data_ranks=distribution.data_ranks,
        reporter=reporter,
        load=clips.clip if clips else None,
    )
    losses = {}
    with torch.no_grad():
        for _ in range(_MICRO_BATCHES // ranks):
            batch = batches.next()
            losses[batch.number] = task.loss(batch, SampleRng.of(0, batch.number))[0].item()
    batches.close()
    assert clips is None or len(clips) == _CLIPS
    return reporter.advanced.get("encode", 0), "hash" in reporter.stages, losses


def test_two_processes_share_a_cache(pool, tmp_path):
    weights = tiny_frozen.save_frozen_parts(tmp_path / "weights")
    *_, expected = _losses(1, weights, None)
    assert sorted(expected) == list(range(_MICRO_BATCHES))
    answers = pool(2).run(_losses, 2, weights, tmp_path / "cache")
    assert [(encoded, hashed) for encoded, hashed, _ in answers] == [(_CLIPS // 2, True), (_CLIPS // 2, False)]
    assert [sorted(losses) for *_, losses in answers] == [[0, 2], [1, 3]]
    found = {number: loss for *_, losses in answers for number, loss in losses.items()}
    assert found == pytest.approx(expected, rel=1e-6)
