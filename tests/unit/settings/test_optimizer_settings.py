"""Rules of optimizer and precision."""

import pytest
from pydantic import ValidationError

from opensora_cli.settings.train import TrainSettings


@pytest.mark.parametrize(
    ("section", "given", "message"),
    [
        ("optimizer", {"schedule": "cosine", "decay_steps": 5}, "decay_steps=5 has no effect .* on: use 0"),
        (
            "optimizer",
            {"initial_learning_rate": 0.1},
            "initial_learning_rate=0.1 must be at most .*=0.001",
        ),
        ("optimizer", {"initial_learning_rate": 1e-6, "warmup_steps": 0}, "=1e-06 has no effect .* more warmup_steps"),
        ("optimizer", {"final_learning_rate": 1e-6}, "final_learning_rate=1e-06 has no effect .* more decay_steps"),
        ("precision", {"compute": "fp16"}, "compute=fp16 is not supported: use bf16"),
        ("precision", {"compute": "fp8"}, "'fp32' or 'bf16'"),
    ],
)
def test_broken_rules(section: str, given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainSettings.model_validate({"target": "vae", section: given})
