"""Moments of optimizers by the names of parameters, so that a checkpoint does not depend on the ranks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.train.optimizer import KernelMuon
from opensora_cli.engine.train.parallelize import local

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True, slots=True)
class Moment:
    """Moment of an optimizer for one weight."""

    parameter: str
    """Name of the weight."""
    name: str
    """Name of the moment: `exp_avg` or `exp_avg_sq` of AdamW, or `momentum_buffer` of Muon."""
    tensor: Tensor
    """Values, with the shape and sharding of the weight."""


def named_moments(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[Moment]:
    """Yield all moments, in the order of the module's parameters."""
    for parameter, weight, optimizer in _trained(module, optimizers):
        state = optimizer.state[weight]
        yield from (Moment(parameter, name, state[name]) for name in _MOMENTS if name in state)


def update_counts(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, int]:
    """Return the number of updates of each parameter with moments.

    It is 0 for Muon, which does not count updates.
    """
    states = ((parameter, optimizer.state[weight]) for parameter, weight, optimizer in _trained(module, optimizers))
    return {parameter: int(state.get("step", 0)) for parameter, state in states if state}


@torch.no_grad()
def restore_moments(
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    counts: Mapping[str, int],
    find: Callable[[str, str], Tensor],
) -> None:
    """Restore the optimizers' moments from a checkpoint. Other options, such as learning rates, stay unchanged.

    `counts` is a result of `update_counts`. `find(parameter, name)` returns a moment with the shape of this rank's part
    of the weight, sharded or plain, on any device, of any dtype. Raises CheckpointError if parameters or shapes do not
    match the module.
    """
    trained = list(_trained(module, optimizers))
    unknown = sorted(counts.keys() - {parameter for parameter, _, _ in trained})
    if unknown:
        raise CheckpointError(f"the checkpoint has moments of {unknown[0]}, which this run does not train")
    for parameter, weight, optimizer in trained:
        state = optimizer.state[weight]
        state.clear()
        if parameter not in counts:
            continue
        names = ("momentum_buffer",) if isinstance(optimizer, KernelMuon) else ("exp_avg", "exp_avg_sq")
        for name in names:
            found, shape = local(find(parameter, name)), local(weight).shape
            if found.shape != shape:
                raise CheckpointError(
                    f"{name} of {parameter} is {list(found.shape)} in the checkpoint, and the weight {list(shape)}"
                )
            state[name] = torch.zeros_like(weight)
            local(state[name]).copy_(found)
        if not isinstance(optimizer, KernelMuon):
            # AdamW keeps its number of updates on the weight's device.
            state["step"] = torch.full((), float(counts[parameter]), device=weight.device)


def _trained(
    module: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> Iterator[tuple[str, nn.Parameter, torch.optim.Optimizer]]:
    owners = {
        id(weight): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    for name, weight in module.named_parameters():
        if id(weight) in owners:
            yield name, weight, owners[id(weight)]
