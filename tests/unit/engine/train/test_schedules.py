"""Learning rates over time."""

import math

import pytest
import torch

from opensora_cli.engine.train.schedules import (
    CosineWarmupLR,
    LinearWarmupLR,
    Schedule,
    create_lr_scheduler,
)
from opensora_cli.settings.train_loop import OptimizerSettings


def factors(steps: int, **settings: object) -> list[float]:
    schedule = Schedule.of(OptimizerSettings(learning_rate=1.0, **settings), steps=steps)
    return [schedule.factor(update) for update in range(steps + 1)]


def rates(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def sgd(rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


AFTER = [(1 + math.cos(math.pi * done / 8)) / 2 for done in range(9)]


@pytest.mark.parametrize(
    ("steps", "settings", "expected"),
    [
        (10, {"warmup_steps": 3, "decay_steps": 3}, [0.25, 0.5, 0.75, *[1] * 5, 2 / 3, 1 / 3, 0]),
        (3, {"warmup_steps": 0, "decay_steps": 0}, [1.0] * 4),
        # Both overlap.
        (4, {"warmup_steps": 4, "decay_steps": 4}, [0.2, 0.4, 0.5, 0.25, 0]),
        (10, {"schedule": "cosine", "warmup_steps": 2}, [1 / 3, 2 / 3, *AFTER]),
        # A warm-up longer than the run.
        (2, {"schedule": "cosine", "warmup_steps": 3}, [0.25, 0.5, 0.75]),
        (
            4,
            {"warmup_steps": 1, "decay_steps": 2, "initial_learning_rate": 0.5, "final_learning_rate": 0.2},
            [0.75, 1, 1, 0.6, 0.2],
        ),
        (2, {"schedule": "cosine", "warmup_steps": 0, "final_learning_rate": 0.1}, [1, 0.55, 0.1]),
    ],
)
def test_the_rate_rises_stays_and_falls(steps, settings, expected):
    assert factors(steps, **settings) == pytest.approx(expected)


class TestSchedulers:
    def test_linear_warmup_agrees_with_the_schedule(self):
        optimizer = sgd(0.5)
        expected = factors(6, warmup_steps=3, initial_learning_rate=0.2)
        seen = rates(LinearWarmupLR(optimizer, 0.1, 3), 6)
        assert seen == pytest.approx([0.5 * factor for factor in expected[:6]])

    def test_linear_warmup_goes_on_where_it_was(self):
        whole = rates(LinearWarmupLR(sgd(0.5), initial_lr=0.1, warmup_steps=5), 6)
        optimizer = sgd(0.5)
        first = LinearWarmupLR(optimizer, initial_lr=0.1, warmup_steps=5)
        assert rates(first, 2) == whole[:2]
        again = LinearWarmupLR(optimizer, initial_lr=0.1, warmup_steps=5, last_epoch=1)
        assert rates(again, 4) == whole[2:]

    def test_created_by_its_options(self):
        assert create_lr_scheduler(sgd(0.5), 10) is None
        warmup = create_lr_scheduler(sgd(0.5), 10, 2, 4)
        assert isinstance(warmup, LinearWarmupLR)
        assert rates(warmup, 5) == pytest.approx([1e-6 + (0.5 - 1e-6) * share for share in (0.2, 0.4, 0.6, 0.8, 1)])
        cosine = create_lr_scheduler(sgd(0.5), 4, 2, 2, True)
        assert isinstance(cosine, CosineWarmupLR)
        expected = factors(8, schedule="cosine", warmup_steps=2)
        assert rates(cosine, 8) == pytest.approx([0.5 * factor for factor in expected[:8]])
