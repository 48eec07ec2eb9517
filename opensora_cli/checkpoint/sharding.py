"""Sharding a model's parameters into equal pieces, one for each rank, and gathering them again.

This is how an averaged copy of a large model is kept: it is only ever updated element by element, so every rank keeps a
flat piece of each parameter, and the whole is needed again only for saving. The last pieces are padded with zeros.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn


def record_model_param_shape(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of every parameter by name: what `model_gathering` needs after `model_sharding`."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def model_sharding(
    model: nn.Module, device: torch.device | str | None = None, *, group: dist.ProcessGroup | None = None
) -> None:
    """Replace every parameter, in place, by this rank's piece of it: a flat tensor, padded to equal lengths.

    Buffers stay whole. Without a process group, or with one rank, the piece is the whole parameter, flat.

    Args:
        model: equal on all ranks; its parameters keep `requires_grad`, and lose their shapes and gradients.
        device: where the pieces go; None leaves them where the parameters are.
        group: the ranks; None is all of them.
    """
    for parameter in model.parameters():
        parameter.data = own_piece(parameter, device, group=group)
        parameter.grad = None


def own_piece(
    whole: Tensor, device: torch.device | str | None = None, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return a copy of this rank's piece of a tensor; arguments are those of `model_sharding`."""
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
    """Gather the pieces of `model_sharding` on the first rank, one parameter at a time, and copy its buffers.

    All ranks must call it. Only the first one needs room for a whole parameter.

    Args:
        model: sharded; it stays so.
        model_shape_dict: the shapes before sharding, by name.
        pinned_state_dict: tensors that receive the whole parameters, and those buffers that it has, on the first rank;
            others may give none. Pinned memory makes the copies from a GPU fast.
        group: the ranks; None is all of them.

    Raises:
        KeyError: a parameter has no shape, or no tensor to receive it.
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
            pinned_state_dict[name].copy_(remove_padding(torch.cat(pieces), shape).view(tuple(shape)))
    if rank == 0:
        for name, buffer in model.named_buffers():
            if name in pinned_state_dict:
                pinned_state_dict[name].copy_(buffer)


def remove_padding(tensor: Tensor, original_shape: Sequence[int]) -> Tensor:
    """Return the first elements of a flat tensor, as many as `original_shape` has; the rest is padding."""
    return tensor[: prod(original_shape)]


def rank_and_count(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this rank and how many there are in a group, None being all; (0, 1) without process groups."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)
