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


def model_sharding(
    model: nn.Module, device: torch.device | str | None = None, *, group: dist.ProcessGroup | None = None
) -> None:
    """Replace every parameter, in place, by this rank's piece, on `device` or on the parameter's device.

    The model is equal on all ranks of the group; None means all ranks. Buffers stay whole. Gradients are dropped.
    """
    for parameter in model.parameters():
        parameter.data = own_piece(parameter, device, group=group)
        parameter.grad = None


def own_piece(
    whole: Tensor, device: torch.device | str | None = None, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return a copy of this rank's piece of a tensor."""
    rank, ranks = rank_and_count(group)
    flat = whole.detach().reshape(-1)
    length = -(-flat.numel() // ranks)
    piece = torch.zeros(length, dtype=flat.dtype, device=device or flat.device)
    own = flat[min(rank * length, flat.numel()) : min((rank + 1) * length, flat.numel())]
    piece[: own.numel()].copy_(own)
    return piece


def model_gathering(
    model: nn.Module,
    model_shape_dict: Mapping[str, Sequence[int]],
    pinned_state_dict: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Gather the pieces of a sharded model on the first rank; all ranks call it.

    `model_shape_dict` has the shapes before sharding. `pinned_state_dict` holds the tensors that receive parameters and
    buffers on the first rank; other ranks may pass an empty one. Raises KeyError if a dictionary lacks a parameter.
    """
    rank, ranks = rank_and_count(group)
    for name, parameter in model.named_parameters():
        shape = model_shape_dict[name]
        piece = parameter.detach().contiguous()
        pieces = [torch.empty_like(piece) for _ in range(ranks)] if rank == 0 else None
        if ranks > 1:
            dist.gather(piece, pieces, group=group, group_dst=0)
        elif pieces is not None:
            pieces = [piece]
        if pieces is not None:
            pinned_state_dict[name].copy_(torch.cat(pieces)[: prod(shape)].view(tuple(shape)))
    if rank == 0:
        for name, buffer in model.named_buffers():
            if name in pinned_state_dict:
                pinned_state_dict[name].copy_(buffer)


def rank_and_count(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this rank and the number of ranks of a group, (0, 1) without process groups. None means all ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)
