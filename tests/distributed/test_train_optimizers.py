"""Optimizers over sharded weights: the same moments and weights as in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from closeness import assert_close
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from opensora_cli.engine.train.optimizer import build_optimizers
from opensora_cli.settings.train_loop import OptimizerSettings

_STEPS = 3
_RATE = {"learning_rate": 1e-2, "weight_decay": 0.1, "eps": 1e-15}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    # A bias of one number is on the first rank alone.
    return nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 1))


def _learn(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    weights = {name: _whole(weight.detach()).clone() for name, weight in model.named_parameters()}
    moments = {
        f"{kind} of {name}": _whole(optimizers[0].state[weight][kind]).clone()
        for name, weight in model.named_parameters()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    return {**weights, **moments}


def _sharded_learns_as_one(offload: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    settings = OptimizerSettings(**_RATE)
    plain = _model()
    plain_optimizers = build_optimizers(plain, settings)
    model = _model()
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    for layer in model:
        fully_shard(layer, offload_policy=policy)
    optimizers = build_optimizers(model, settings)
    for network, its in ((plain, plain_optimizers), (model, optimizers)):
        _learn(network, its, range(_STEPS))
    kinds = [type(state["exp_avg"]).__name__ for state in optimizers[0].state.values()]
    return _state(plain, plain_optimizers), _state(model, optimizers), kinds


@pytest.mark.parametrize("offload", [False, True])
def test_sharded_weights_learn_as_in_one_process(pool: Callable[[int], Any], offload: bool) -> None:
    for expected, found, kinds in pool(2).run(_sharded_learns_as_one, offload):
        assert len(expected) == 4 * 3
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert_close(found[name], value, tolerance=1e-6, what=name)
        assert kinds == ["DTensor"] * 4
