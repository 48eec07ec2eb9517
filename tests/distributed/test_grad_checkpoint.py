"""Checkpoints and offload inside DDP and FSDP2: gradients as in plain data-parallel training, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_strategies import tiny_transformer
from tiny_transformer import inputs, loss_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from opensora_cli.memory.activations import ActivationManager
from opensora_cli.memory.checkpointing import set_grad_checkpoint
from opensora_cli.models.mmdit.model import MMDiT

_STEPS = 2


def _train(model: nn.Module, module: nn.Module) -> list[dict[str, Tensor]]:
    """Return the gradients of some steps, between which the weights move, each rank with a batch of its own."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps = []
    for step in range(_STEPS):
        optimizer.zero_grad()
        loss_of(model, inputs(module, seed=2 * step + dist.get_rank())).backward()
        steps.append({name: _whole(weight.grad) for name, weight in module.named_parameters()})
        optimizer.step()
    return steps


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def _same(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> bool:
    assert len(ours) == _STEPS
    assert all(gradient.any() for name, gradient in ours[-1].items() if "weight" in name)
    return all(torch.equal(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in b)


def _manager() -> ActivationManager:
    manager = ActivationManager()
    manager.setup_buffer(10**5, torch.float32)
    return manager


def _ddp() -> tuple[bool, int, int]:
    plain = tiny_transformer()
    expected = _train(DistributedDataParallel(plain), plain)
    model, manager = tiny_transformer(), _manager()
    parallel = DistributedDataParallel(model)
    set_grad_checkpoint(model, activations=manager)
    return _same(_train(parallel, model), expected), manager.copied_to_device, manager.used_bytes


def _shard(model: MMDiT) -> None:
    for block in (*model.double_blocks, *model.single_blocks):
        fully_shard(block)
    fully_shard(model)


def _fsdp(checkpoint_first: bool) -> tuple[bool, int, int]:
    plain = tiny_transformer()
    _shard(plain)
    expected = _train(plain, plain)
    model, manager = tiny_transformer(), _manager()
    if checkpoint_first:
        set_grad_checkpoint(model, activations=manager)
    _shard(model)
    if not checkpoint_first:
        set_grad_checkpoint(model, activations=manager)
    same = _same(_train(model, model), expected)
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    return same, manager.copied_to_device, manager.used_bytes


@pytest.mark.parametrize(("function", "args"), [(_ddp, ()), (_fsdp, (True,)), (_fsdp, (False,))])
def test_gradients(pool: Callable[[int], Any], function: Callable[..., Any], args: tuple[bool, ...]) -> None:
    for same, copied, left in pool(2).run(function, *args):
        assert same
        assert copied > 0
        assert left == 0
