"""The moments of optimizers by the names of parameters, so that a checkpoint does not depend on the ranks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.train.offloaded_adamw import OffloadedAdamW, fresh_state
from opensora_cli.engine.train.optimizer import KernelMuon
from opensora_cli.engine.train.strategy.distribution import local

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True, slots=True)
class Moment:
    """One of the averages over past gradients that an optimizer keeps for a weight."""

    parameter: str
    """The weight's name."""
    name: str
    """`exp_avg` and `exp_avg_sq` of AdamW, `momentum_buffer` of Muon."""
    tensor: Tensor
    """Shaped as the weight, and sharded like it."""


def named_moments(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[Moment]:
    """Yield all moments, in the order of the module's parameters.

    Those of a sharded weight are sharded alike, and on its device, wherever the optimizer keeps them.
    """
    for updated in _updated(module, optimizers):
        state = updated.state()
        yield from (
            Moment(updated.name, name, _laid_out_as(updated.weight, state[name])) for name in _MOMENTS if name in state
        )


def update_counts(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, int]:
    """Return the names of the parameters that have moments, and how many updates each has had.

    Muon does not count; there it is 0.
    """
    states = ((updated.name, updated.state()) for updated in _updated(module, optimizers))
    return {name: int(state["step"]) if "step" in state else 0 for name, state in states if state}


@torch.no_grad()
def restore_moments(
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    counts: Mapping[str, int],
    find: Callable[[str, str], Tensor],
) -> None:
    """Give the optimizers the moments of a checkpoint. Rates, decays and the like stay as this run has them.

    `counts` are those of `update_counts`. `find(parameter, name)` returns a moment with the shape of this rank's part
    of the weight, sharded or plain; on any device, of any dtype. Raises CheckpointError if parameters or shapes are not
    those of the module.
    """
    all_updated = list(_updated(module, optimizers))
    unknown = sorted(counts.keys() - {updated.name for updated in all_updated})
    if unknown:
        raise CheckpointError(f"the checkpoint has moments of {unknown[0]}, which this run does not train")
    for updated in all_updated:
        updated.state().clear()
        if updated.name in counts:
            fresh = updated.fresh_state()
            for name, value in fresh.items():
                if name == "step":
                    value.fill_(counts[updated.name])
                else:
                    _copy(find(updated.name, name), value, f"{name} of {updated.name}", updated.weight)
            updated.state().update(fresh)


@dataclass(frozen=True, slots=True)
class _Updated:
    """A weight, and what updates it."""

    name: str
    weight: nn.Parameter
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.optimizer.state[self.weight]
        return state

    def fresh_state(self) -> dict[str, Tensor]:
        """Return what the optimizer would keep before its first update of the weight."""
        if isinstance(self.optimizer, KernelMuon):
            return {"momentum_buffer": torch.zeros_like(self.weight)}
        if isinstance(self.optimizer, OffloadedAdamW):
            return fresh_state(self.weight)
        step = torch.zeros((), device=self.weight.device)
        return {"step": step, "exp_avg": torch.zeros_like(self.weight), "exp_avg_sq": torch.zeros_like(self.weight)}


def _updated(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[_Updated]:
    owners = {
        id(weight): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    for name, weight in module.named_parameters():
        if id(weight) in owners:
            yield _Updated(name, weight, owners[id(weight)])


def _laid_out_as(weight: nn.Parameter, moment: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return moment
    if isinstance(moment, DTensor):
        return moment
    return DTensor.from_local(
        moment.to(weight.device),
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def _copy(found: Tensor, target: Tensor, what: str, weight: nn.Parameter) -> None:
    source, shape = local(found), local(weight).shape
    if source.shape != shape:
        raise CheckpointError(f"{what} is {list(source.shape)} in the checkpoint, and the weight {list(shape)}")
    local(target).copy_(source)
