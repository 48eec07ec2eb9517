"""Ranks that choose what is computed again: the same on all, by the one with the least room, and the same bits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_frozen
import tiny_training
import torch
import torch.distributed as dist
from tiny_strategies import Case, open_trainer

from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.train.activations import ActivationPlan, saved_activations
from opensora_cli.engine.train.estimate import estimate_training
from opensora_cli.engine.train.recomputing import Choice, agreed_choice, choose_activations
from opensora_cli.engine.train.state import whole_weights
from opensora_cli.settings.train import TrainSettings

CASES = [
    Case("ddp", 2),
    Case("zero3", 2),
    Case("hybrid", 2, (("ulysses_degree", 2),)),
    Case("hybrid", 2, (("tensor_parallel_degree", 2),)),
]


def _trained(
    case: Case, settings: TrainSettings, choices: list[Choice]
) -> tuple[ActivationPlan, dict[str, torch.Tensor], list[float]]:
    """Return what was agreed, the weights after a step with it, and the losses of the ranks."""
    rank = dist.get_rank()
    plan = agreed_choice(choices[rank], ranks=case.ranks)
    trainer = open_trainer(settings, case.open(torch.bfloat16))
    with saved_activations(trainer.task.module, plan):
        losses = [trainer.do_step().figures["loss"] for _ in range(2)]
    assert plan is not None
    return plan, whole_weights(trainer), losses


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_keep_the_same_and_learn_the_same_bits(pool: Callable[[int], Any], case: Case, tmp_path: Path) -> None:
    settings = tiny_training.mmdit_settings(tmp_path / "run", tiny_frozen.save_frozen_parts(tmp_path)).replace(
        {
            "optimizer.name": "adamw",
            "precision.compute": "bf16",
            "loop.micro_batches": 2,
            "memory.checkpointing": "auto",
            "strategy": case.strategy,
            "parallel": case.parallel,
        }
    )
    # So much more than the least that something is kept.
    free = int((estimate_training(settings).peak_bytes + 20_000) / 0.9)
    less = choose_activations(settings, rank=0, free_bytes=free, is_gpu=False, reporter=SilentReporter())
    assert 0 < less.height < 1
    assert less.plan.kept
    nothing = less.plan.model_copy(update={"checkpointed_blocks": {"double_blocks": 0, "single_blocks": 0}, "kept": ()})
    # Memory that was counted cannot be sent.
    choices = [replace(less, memory=None), Choice(1.0, nothing, None)]
    kept = pool(case.ranks).run(_trained, case, settings, choices)
    assert {plan.model_dump_json() for plan, _, _ in kept} == {choices[0].plan.model_dump_json()}
    most = pool(case.ranks).run(_trained, case, settings, [choices[1], choices[1]])
    (_, weights, losses), (_, others, same) = kept[0], most[0]
    assert losses == same
    assert len(weights) > 10
    assert all(torch.equal(weights[name], others[name]) for name in weights)
