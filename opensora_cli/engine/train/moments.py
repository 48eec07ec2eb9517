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
    """Average over past gradients that an optimizer keeps for a weight."""

    parameter: str
    """Name of the weight."""
    name: str
    """`exp_avg` and `exp_avg_sq` of AdamW, `momentum_buffer` of Muon."""
    tensor: Tensor
    """Shaped and sharded like the weight."""


def named_moments(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[Moment]:
    """Yield all moments, in the order of the module's parameters."""
    for parameter, weight, optimizer in _trained(module, optimizers):
        state = optimizer.state[weight]
        yield from (Moment(parameter, name, state[name]) for name in _MOMENTS if name in state)


def update_counts(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, int]:
    """Return the names of the parameters that have moments, with the number of their updates.

    Muon does not count; there it is 0.
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
    """Give the optimizers the moments of a checkpoint. Rates, decays and the like stay those of this run.

    `counts` are those of `update_counts`. `find(parameter, name)` returns a moment with the shape of this rank's part
    of the weight, sharded or plain; on any device, of any dtype. Raises CheckpointError if parameters or shapes are not
    those of the module.
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
            # AdamW counts its updates beside the weight.
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
