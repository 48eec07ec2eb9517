"""The trainer with each strategy: what some ranks save, others take up, with another strategy or fewer of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_strategies import Case, micro_batch, tiny_transformer
from torch import Tensor

from opensora_cli.data.batches import SampledBatches, SampleRng
from opensora_cli.engine.train.checkpoints import CheckpointWriter
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.state import restore
from opensora_cli.engine.train.trainer import Clock, Task, Trainer
from opensora_cli.settings.train_loop import CheckpointSettings, Compute, LoopSettings, OptimizerSettings

Pool = Callable[[int], Any]
_LOOP = LoopSettings(steps=3, micro_batches=4, ema_decay=0.9)
_OPTIMIZER = OptimizerSettings(learning_rate=1e-3, warmup_steps=2, max_grad_norm=2.0)

CASES = [
    pytest.param(Case("ddp", 2), marks=pytest.mark.slow),
    pytest.param(Case("zero2", 2), marks=pytest.mark.slow),
    pytest.param(Case("zero3", 4, (("dp_shard_degree", 2),)), marks=pytest.mark.slow),
    pytest.param(Case("hybrid", 4, (("tensor_parallel_degree", 2), ("ulysses_degree", 2))), marks=pytest.mark.slow),
    Case("hybrid", 2, (("ring_degree", 2),)),
    pytest.param(Case("hybrid", 4, (("tensor_parallel_degree", 2),)), marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class _Batch:
    number: int

    @property
    def paths(self) -> tuple[str, ...]:
        return (f"clip{self.number}",)


class _Task(Task):
    """Learns random velocities."""

    def __init__(self, distribution: Distribution) -> None:
        super().__init__(tiny_transformer())
        self.shard(distribution)

    def loss(self, batch: _Batch, rng: SampleRng) -> tuple[Tensor, dict[str, float]]:
        given, target = micro_batch(self.module, batch.number)
        velocity = self.forward(given.pop("packed_latents_BND"), **given)
        return (velocity - target).square().mean(), {}

    def tokens(self, batch: _Batch) -> int:
        return 1

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        pass


def _draw(rng: SampleRng, number: int) -> _Batch:
    return _Batch(number)


def _trainer(distribution: Distribution) -> Trainer:
    return Trainer(
        _Task(distribution),
        SampledBatches(_draw, seed=0, rank=distribution.data_rank, ranks=distribution.data_ranks),
        loop=_LOOP,
        optimizer=_OPTIMIZER,
        compute=Compute.FP32,
        distribution=distribution,
        clock=Clock(),
    )


def _steps(trainer: Trainer, count: int) -> list[float]:
    return [trainer.do_step().figures["loss"] for _ in range(count)]


def _averages(trainer: Trainer) -> dict[str, Tensor]:
    distribution = trainer.distribution
    assert trainer.ema is not None
    return {
        distribution.whole_name(name): distribution.whole(name, tensor).clone() for name, tensor in trainer.ema.items()
    }


def _alone() -> Distribution:
    return Distribution(torch.device("cpu"))


@cache
def _expected() -> tuple[list[float], dict[str, Tensor]]:
    trainer = _trainer(_alone())
    return _steps(trainer, 3), _averages(trainer)


def _saved(case: Case, output: Path) -> tuple[list[float], Path]:
    trainer = _trainer(case.open())
    losses = _steps(trainer, 2)
    with CheckpointWriter(output, CheckpointSettings()) as writer:
        folder = writer.save(trainer)
    return losses, folder


def _resumed(case: Case | None, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    trainer = _trainer(case.open() if case else _alone())
    restore(trainer, folder)
    return _steps(trainer, 1), _averages(trainer)


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[list[float], Path]]:
    """Save by each strategy once."""
    return cache(lambda case: pool(case.ranks).run(_saved, case, tmp_path_factory.mktemp("run"))[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_process_resumes_what_several_saved_and_they_resume_it_too(pool: Pool, saved: Any, case: Case) -> None:
    expected, averages = _expected()
    losses, folder = saved(case)
    assert losses == pytest.approx(expected[:2], rel=0, abs=1e-5)
    for more, ours in (_resumed(None, folder), *pool(case.ranks).run(_resumed, case, folder)):
        assert more == pytest.approx(expected[2:], rel=0, abs=1e-5)
        assert ours.keys() == averages.keys()
        assert all(torch.allclose(ours[name], average, rtol=0, atol=1e-5) for name, average in averages.items())


def test_more_ranks_with_another_strategy_resume(pool: Pool, saved: Any) -> None:
    expected, _ = _expected()
    _, folder = saved(CASES[4])
    for more, _ in pool(4).run(_resumed, Case("zero1", 4), folder):
        assert more == pytest.approx(expected[2:], rel=0, abs=1e-5)
