"""Adapters trained by each strategy over real processes, against one process."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tiny_strategies import Case, Run, tiny_transformer
from torch import Tensor

from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.lora import add_lora
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.train_loop import LoraSettings

STEPS = 5
MICRO_BATCHES = 2


def _with_adapter(dtype: torch.dtype, dropout: float) -> MMDiT:
    model = tiny_transformer().to(dtype)
    add_lora(model, LoraSettings(rank=3, alpha=12.0, dropout=dropout), seed=0)
    return model


def _trained(run: Run) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses, and the adapter in the end."""
    forward = run.forward

    def seeded(latents: Tensor, **given: Tensor) -> Tensor:
        # As the trainer does it: what is left out depends on the micro-batch alone.
        torch.manual_seed(int(latents.abs().sum() * 1000))
        return forward(latents, **given)

    run.forward = seeded
    run.optimizer.param_groups[0]["lr"] = 0.02
    run.step(STEPS)
    return run.losses, {name: weight for name, weight in run.whole().items() if ".lora_" in name}


@cache
def _expected(dtype: torch.dtype, dropout: float) -> tuple[list[float], dict[str, Tensor]]:
    losses, adapter = _trained(Run(Distribution(torch.device("cpu")), _with_adapter(dtype, dropout), MICRO_BATCHES))
    assert losses[-1] < 0.97 * losses[0]
    assert len(adapter) == 2 * (12 + 4)
    return losses, adapter


def _by_ranks(case: Case, dtype: torch.dtype, dropout: float) -> tuple[list[float], dict[str, Tensor]]:
    return _trained(Run(case.open(), _with_adapter(dtype, dropout), MICRO_BATCHES))


@pytest.mark.parametrize(
    ("case", "dropout"),
    [
        (Case("zero3", 2), 0.2),
        (Case("hybrid", 2, (("ulysses_degree", 2),)), 0.0),
        pytest.param(Case("zero2", 2), 0.2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_strategy_learns_the_adapter_of_one_process(
    pool: Callable[[int], Any], case: Case, dropout: float
) -> None:
    losses, adapter = _expected(torch.float32, dropout)
    for our_losses, ours in pool(case.ranks).run(_by_ranks, case, torch.float32, dropout):
        assert our_losses == pytest.approx(losses, rel=0, abs=1e-5)
        assert ours.keys() == adapter.keys()
        assert max((ours[name] - value).abs().max().item() for name, value in adapter.items()) < 1e-3
