"""What ranks offload of a step is what was planned, in half precision and where they share a clip, too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_frozen
import tiny_training
import torch
from tiny_strategies import Case, open_trainer

from opensora_cli.engine.train.activations import plan_activations, saved_activations
from opensora_cli.settings.train import TrainSettings

CASES = [
    Case("hybrid", 2, (("ring_degree", 2),)),
    Case("zero2", 2),
]


def _offloaded(case: Case, settings: TrainSettings) -> int:
    trainer = open_trainer(settings, case.open(torch.bfloat16))
    with saved_activations(trainer.task.module, plan_activations(settings)) as manager:
        trainer.do_step()
    assert manager is not None
    return manager.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_buffer_is_as_large_as_needed(pool: Callable[[int], Any], case: Case, tmp_path: Path) -> None:
    settings = tiny_training.mmdit_settings(tmp_path / "run", tiny_frozen.save_frozen_parts(tmp_path)).replace(
        {
            "optimizer.name": "adamw",
            "precision.compute": "bf16",
            "loop.micro_batches": 2,
            "memory.checkpointing": "offload",
            "strategy": case.strategy,
            "parallel": case.parallel,
        }
    )
    plan = plan_activations(settings)
    assert plan is not None
    whole = plan_activations(settings.replace({"strategy": "ddp", "parallel": {}}))
    assert whole is not None
    sharing = 2 if "ring_degree" in case.parallel.degrees else 1
    # Rotary tables stay in fp32, and so on the device.
    assert 0.8 * whole.needed_bytes < 2 * sharing * plan.needed_bytes < whole.needed_bytes
    assert max(pool(case.ranks).run(_offloaded, case, settings)) == plan.needed_bytes
