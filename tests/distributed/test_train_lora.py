"""Adapters trained by each strategy over real processes, against one process."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_strategies import Case, NumberedBatch, Run, micro_batch, tiny_transformer, train_task
from torch import Tensor

from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.lora import add_lora
from opensora_cli.engine.train.objectives.base import MODEL, Losses, Role, Task
from opensora_cli.memory.checkpointing import set_grad_checkpoint
from opensora_cli.memory.streaming import stream_blocks
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.train_loop import LoraSettings, OptimizerSettings

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


def _streamed(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    model = _with_adapter(torch.float32, 0.2)
    run = Run(case.open(), model, MICRO_BATCHES)
    stacks = [model.double_blocks, model.single_blocks]
    with stream_blocks(stacks, device="cpu", resident=1, trains=True), set_grad_checkpoint(model):
        return _trained(run)


@pytest.mark.slow
def test_whole_copies_stream_their_frozen_blocks(pool: Callable[[int], Any]) -> None:
    losses, adapter = _expected(torch.float32, 0.2)
    for our_losses, ours in pool(2).run(_streamed, Case("ddp", 2)):
        assert our_losses == pytest.approx(losses, rel=0, abs=1e-5)
        assert max((ours[name] - value).abs().max().item() for name, value in adapter.items()) < 1e-3


class _Alternating(Task):
    """Two adapters of one model, the first of which learns in every second step."""

    def __init__(self, distribution: Distribution) -> None:
        peft = pytest.importorskip("peft")
        model = _with_adapter(torch.float32, 0.0)
        generator = torch.Generator().manual_seed(1)
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=".*(q_proj|v_proj)"), model, "critic")
        for name, weight in model.named_parameters():
            weight.requires_grad_(".lora_" in name)
            if ".critic." in name:
                weight.data.normal_(std=0.1, generator=generator)
        critic = OptimizerSettings(learning_rate=1e-2, warmup_steps=0, eps=1e-3)
        super().__init__(model, roles={"critic": Role(model, critic, owns=lambda name: ".critic." in name)})
        self.shard(distribution)

    def begin_step(self, step: int) -> None:
        self._step = step

    def loss(self, batch: NumberedBatch, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        return self._error("default", self.forward, batch), {}

    def losses(self, batch: NumberedBatch, rng: SampleRng) -> Losses:
        if self._step % 2 == 0:
            yield MODEL, *self.loss(batch, rng)
        yield "critic", self._error("critic", self.roles["critic"].forward, batch), {}

    def _error(self, adapter: str, forward: Callable[..., Tensor], batch: NumberedBatch) -> Tensor:
        for layer in self.module.modules():
            if hasattr(layer, "lora_A"):
                layer._active_adapter = [adapter]
        given, target = micro_batch(self.module, batch.number)
        return (forward(given.pop("packed_latents_BND"), **given) - target).square().mean()

    def tokens(self, batch: NumberedBatch) -> int:
        return 1

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        pass


def _alternated(case: Case | None) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    distribution = case.open() if case else Distribution(torch.device("cpu"))
    return train_task(_Alternating(distribution), distribution, steps=3)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize(
    "case", [Case("ddp", 2), Case("zero3", 2), pytest.param(Case("zero1", 2), marks=pytest.mark.slow)], ids=str
)
def test_two_adapters_of_one_model_learn_in_turn_as_in_one_process(pool: Callable[[int], Any], case: Case) -> None:
    figures, weights = _alternated(None)
    assert ["loss" in each for each in figures] == [True, False, True]
    for our_figures, ours in pool(case.ranks).run(_alternated, case):
        for found, expected in zip(our_figures, figures, strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert ours.keys() == weights.keys()
        assert all(torch.allclose(ours[name], value, rtol=0, atol=1e-4) for name, value in weights.items())
