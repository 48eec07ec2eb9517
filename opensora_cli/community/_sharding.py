"""Equal flat pieces of a model's parameters, one for each rank, padded with zeros.

An averaged copy of a large model is updated element by element, so a rank needs the whole copy only for saving.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn


def record_model_param_shape(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each parameter by name, for `model_gathering`."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def model_sharding(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Replace every parameter, in place, by this rank's piece, on `device` or on the parameter's device.

    The model is equal on all ranks. Buffers stay whole, and gradients are dropped.
    """
    for parameter in model.parameters():
        parameter.data = own_piece(parameter, device)
        parameter.grad = None


def own_piece(whole: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Return a copy of this rank's piece of a tensor."""
    rank, ranks = rank_and_count()
    flat = whole.detach().flatten()
    length = -(-flat.numel() // ranks)
    piece = torch.zeros(length, dtype=flat.dtype, device=device or flat.device)
    own = flat[rank * length : (rank + 1) * length]
    piece[: own.numel()].copy_(own)
    return piece


def model_gathering(
    model: nn.Module, model_shape_dict: Mapping[str, Sequence[int]], pinned_state_dict: Mapping[str, Tensor]
) -> None:
    """Gather the pieces of a sharded model on the first rank; all ranks call it.

    `model_shape_dict` has the shapes before sharding. `pinned_state_dict` holds the tensors that receive parameters and
    buffers on the first rank; other ranks may pass an empty one. Raises KeyError if a dictionary lacks a parameter.
    """
    rank, ranks = rank_and_count()
    for name, parameter in model.named_parameters():
        shape = tuple(model_shape_dict[name])
        pieces = [torch.empty_like(parameter) for _ in range(ranks)] if rank == 0 else None
        if ranks > 1:
            dist.gather(parameter.detach().contiguous(), pieces)
        elif pieces is not None:
            pieces = [parameter.detach()]
        if pieces is not None:
            pinned_state_dict[name].copy_(torch.cat(pieces)[: prod(shape)].view(shape))
    if rank == 0:
        for name, buffer in model.named_buffers():
            if name in pinned_state_dict:
                pinned_state_dict[name].copy_(buffer)


def rank_and_count() -> tuple[int, int]:
    """Return this rank and the number of ranks, (0, 1) without process groups."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
