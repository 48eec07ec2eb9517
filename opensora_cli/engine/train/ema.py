"""Exponential moving average of the weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from opensora_cli.engine.train.parallelize import local


@torch.no_grad()
def update_ema(ema_model: nn.Module | Mapping[str, Tensor], model: nn.Module, *, decay: float) -> None:
    """Update the averaged weights in place: ema = decay * ema + (1 - decay) * weight.

    `decay` is 0 to 1. `ema_model` is a module of the same structure, or the result of `averaged_copy`. A weight that a
    model uses in two places counts once. If weights are sharded, each rank updates its parts.
    """
    averaged = module_state(ema_model) if isinstance(ema_model, nn.Module) else ema_model
    current = module_state(model)
    names = [name for name, average in averaged.items() if average.is_floating_point()]
    ours = [local(averaged[name]) for name in names]
    theirs = [local(current[name]).to(averaged[name].dtype) for name in names]
    torch._foreach_lerp_(ours, theirs, 1.0 - decay)


def warmed_up(decay: float, step: int) -> float:
    """Return the decay at a step. Early steps average over fewer weights, to forget the initial ones."""
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def averaged_copy(model: nn.Module, *, trained_only: bool = False) -> dict[str, Tensor]:
    """Return a copy of the weights to start an average from, by name, sharded like the model.

    `trained_only` skips frozen weights and buffers.
    """
    state = module_state(model, trained_only=trained_only)
    return {name: value.clone() for name, value in state.items() if value.is_floating_point()}


@contextmanager
def swapped_in(averaged: Mapping[str, Tensor], model: nn.Module) -> Iterator[None]:
    """Swap the averaged weights into the model inside the block.

    Both are exchanged in place, so that optimizers and wrappers keep the same tensors.
    """
    _exchange(averaged, model)
    try:
        yield
    finally:
        _exchange(averaged, model)


def module_state(module: nn.Module, *, trained_only: bool = False) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; a tensor in two places of the module appears once.

    `trained_only` skips frozen weights and buffers.
    """
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in seen and (value.requires_grad or not trained_only):
            seen.add(id(value))
            state[name] = value.detach()
    return state


@torch.no_grad()
def _exchange(averaged: Mapping[str, Tensor], model: nn.Module) -> None:
    state = module_state(model)
    for name, average in averaged.items():
        ours, theirs = local(average), local(state[name])
        held = theirs.clone()
        theirs.copy_(ours)
        ours.copy_(held)
