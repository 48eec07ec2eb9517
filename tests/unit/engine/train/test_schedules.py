"""Learning rates over time."""

import math

import pytest

from opensora_cli.engine.train.optimizer import rate_factor
from opensora_cli.settings.train_loop import OptimizerSettings


def factors(steps: int, **settings: object) -> list[float]:
    chosen = OptimizerSettings(learning_rate=1.0, **settings)
    return [rate_factor(chosen, update, steps=steps) for update in range(steps + 1)]


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
