"""What optimizers keep, by the names of parameters."""

import pytest
import torch
from torch import nn

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.train.moments import named_moments, restore_moments, update_counts
from opensora_cli.engine.train.optimizer import build_optimizers, set_rates
from opensora_cli.settings.train_loop import OptimizerSettings

ADAMW, MUON = {"name": "adamw"}, {"name": "muon"}


class Kernels(nn.Module):
    """A kernel inside a block, and a matrix outside; one bias never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.ModuleList([nn.Conv3d(2, 4, (3, 2, 2))])
        self.out = nn.Linear(4, 1)

    def learn(self, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if name != "out.bias":
                weight.grad = torch.randn(weight.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


def trained(seeds: range, **settings: object) -> tuple[Kernels, list[torch.optim.Optimizer]]:
    module = Kernels()
    optimizers = build_optimizers(module, OptimizerSettings(learning_rate=1e-2, **settings))
    for seed in seeds:
        module.learn(optimizers, seed)
    return module, optimizers


class TestNamedMoments:
    def test_names_and_shapes(self):
        module, optimizers = trained(range(2), **MUON)
        shapes = {
            (moment.parameter, moment.name): tuple(moment.tensor.shape) for moment in named_moments(module, optimizers)
        }
        assert shapes == {
            ("block.0.weight", "momentum_buffer"): (4, 2, 3, 2, 2),
            ("block.0.bias", "exp_avg"): (4,),
            ("block.0.bias", "exp_avg_sq"): (4,),
            ("out.weight", "exp_avg"): (1, 4),
            ("out.weight", "exp_avg_sq"): (1, 4),
        }
        assert update_counts(module, optimizers) == {"block.0.weight": 0, "block.0.bias": 2, "out.weight": 2}

    def test_nothing_before_the_first_update(self):
        module, optimizers = trained(range(0), **ADAMW)
        assert list(named_moments(module, optimizers)) == []
        assert update_counts(module, optimizers) == {}


class TestRestoreMoments:
    @pytest.mark.parametrize("settings", [ADAMW, MUON])
    def test_training_goes_on_bitwise_identical(self, settings):
        whole, _ = trained(range(5), **settings)
        module, optimizers = trained(range(3), **settings)
        saved = {(moment.parameter, moment.name): moment.tensor.clone() for moment in named_moments(module, optimizers)}
        counts = update_counts(module, optimizers)
        again = Kernels()
        again.load_state_dict(module.state_dict())
        others = build_optimizers(again, OptimizerSettings(learning_rate=1e-2, **settings))
        # Earlier moments are dropped.
        again.learn(others, seed=9)
        again.load_state_dict(module.state_dict())
        restore_moments(again, others, counts, lambda parameter, name: saved[parameter, name])
        assert update_counts(again, others) == counts
        for seed in range(3, 5):
            again.learn(others, seed)
        for expected, found in zip(whole.parameters(), again.parameters(), strict=True):
            assert torch.equal(expected, found)

    def test_rates_are_those_of_this_run(self):
        module, optimizers = trained(range(1), **ADAMW)
        saved = {(moment.parameter, moment.name): moment.tensor for moment in named_moments(module, optimizers)}
        again = Kernels()
        fresh = build_optimizers(again, OptimizerSettings(learning_rate=1e-3, beta1=0.7))
        restore_moments(again, fresh, update_counts(module, optimizers), lambda *key: saved[key])
        set_rates(fresh, 1.0)
        assert (fresh[0].param_groups[0]["lr"], fresh[0].param_groups[0]["betas"]) == (1e-3, (0.7, 0.98))

    def test_moments_of_another_model_are_refused(self):
        module, optimizers = trained(range(0), **ADAMW)
        with pytest.raises(CheckpointError, match=r"moments of head\.weight, which"):
            restore_moments(module, optimizers, {"head.weight": 1}, lambda *key: torch.zeros(1))
        with pytest.raises(CheckpointError, match=r"exp_avg of out\.weight is \[2\] in the checkpoint.* \[1, 4\]"):
            restore_moments(module, optimizers, {"out.weight": 1}, lambda *key: torch.zeros(2))
