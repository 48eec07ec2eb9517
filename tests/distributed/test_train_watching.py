"""Validation and videos of runs on several ranks: as of one, and no rank waits for another for ever."""

from functools import cache
from pathlib import Path

import pytest
import tiny_frozen
import tiny_training
import torch
from tiny_strategies import Case
from toy_training import ToyTask, draw, new_trainer, toy_trainer

from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.batches import SampleRng, Stream
from opensora_cli.engine.encode.datasets import open_batches
from opensora_cli.engine.train.build import build_task
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.evaluate import HeldOutLoss, open_samples, open_validation
from opensora_cli.media.read import read_video
from opensora_cli.settings.train_sections import ValidationSettings

ZERO3, TENSOR = Case("zero3", 2), Case("hybrid", 2, (("tensor_parallel_degree", 2),))


def _alone() -> Distribution:
    return Distribution(torch.device("cpu"))


def _toy(case: Case | None) -> tuple[list[float], list[float]]:
    """Return the losses of training, and of validations on three micro-batches, which two ranks cannot share evenly."""
    trainer = toy_trainer(ToyTask(), distribution=case.open() if case else _alone(), micro_batches=2)
    validation = HeldOutLoss(
        read=lambda index: draw(SampleRng.of(99, index, Stream.DATA), index),
        count=3,
        settings=ValidationSettings(every=1),
        last_step=9,
    )
    losses, validated = [], []
    for _ in range(3):
        losses.append(trainer.do_step().figures["loss"])
        validated.append(validation.run(trainer.step, trainer)["loss"])
    return losses, validated


def test_ranks_share_the_validation(pool):
    losses, validated = _toy(None)
    assert len(set(validated)) == 3
    answers = pool(2).run(_toy, Case("ddp", 2))
    assert answers[0] == answers[1]
    assert answers[0][0] == pytest.approx(losses, rel=1e-6)
    assert answers[0][1] == pytest.approx(validated, rel=1e-6)


def _watched(case: Case | None, weights: Path, output: Path, steps: int = 2) -> tuple[list[float], list[float]]:
    settings = tiny_training.mmdit_settings(output, weights).replace(
        {
            "loop.micro_batches": 2,
            "optimizer.name": "adamw",
            # So that gradients of zero but for rounding, which differ between runs, move no weight.
            "optimizer.eps": 1e-3,
            "precision.compute": "fp32",
            "validation.every": 1,
            "validation.table": tiny_training.HELD_OUT,
            "validation.batches": 3,
            "samples.every": 1,
            **tiny_training.SAMPLE_SIZE,
            "samples.prompts": ("rain", "snow"),
            "samples.num_inference_steps": 2,
        }
    )
    distribution, reporter = case.open() if case else _alone(), SilentReporter()
    samples = open_samples(settings, distribution=distribution, output=output, reporter=reporter)
    validation = open_validation(settings, distribution=distribution, reporter=reporter)
    assert samples is not None
    assert validation is not None
    ranks = {"data_rank": distribution.data_rank, "data_ranks": distribution.data_ranks}
    trainer = new_trainer(
        build_task(settings, distribution=distribution, reporter=reporter),
        open_batches(settings, reporter=reporter, **ranks),
        optimizer=settings.optimizer,
        distribution=distribution,
        **settings.loop.model_dump(),
    )
    losses, validated = [], []
    for _ in range(steps):
        losses.append(trainer.do_step().figures["loss"])
        validated.append(validation.run(trainer.step, trainer)["loss"])
        samples.run(trainer.step, trainer)
    trainer.batches.close()
    return losses, validated


@cache
def _expected(weights: Path, output: Path) -> tuple[list[float], list[float]]:
    return _watched(None, weights, output)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    return tiny_frozen.save_frozen_parts(tmp_path_factory.mktemp("frozen"))


@pytest.mark.slow
@pytest.mark.parametrize("case", [ZERO3, TENSOR, Case("hybrid", 2, (("ulysses_degree", 2),))], ids=str)
def test_ranks_validate_and_sample_as_one_process(pool, case, frozen, tmp_path):
    alone = frozen / "alone"
    losses, validated = _expected(frozen, alone)
    for also_losses, also_validated in pool(case.ranks).run(_watched, case, frozen, tmp_path):
        assert also_losses == pytest.approx(losses, rel=0, abs=1e-5)
        assert also_validated == pytest.approx(validated, rel=0, abs=1e-5)
    videos = ["rain_seed0.mp4", "snow_seed1.mp4"]
    assert sorted(path.name for path in (tmp_path / "samples" / "step2").iterdir()) == videos
    for name in videos:
        ours, theirs = (
            read_video(folder / "samples" / "step2" / name).frames_THWC.int() for folder in (tmp_path, alone)
        )
        assert (ours - theirs).abs().max() <= 8


@pytest.mark.slow
def test_no_rank_hangs_if_videos_cannot_be_written(pool, frozen, tmp_path):
    (tmp_path / "samples").write_text("in the way of the folder")
    losses, _ = _expected(frozen, frozen / "alone")
    for found, _ in pool(2).run(_watched, ZERO3, frozen, tmp_path, 1):
        assert found == pytest.approx(losses[:1], rel=0, abs=1e-5)
