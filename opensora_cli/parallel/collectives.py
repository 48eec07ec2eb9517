"""Collectives with gradients, for shares of any size.

A group of one rank, or None, means that a collective does nothing. All ranks of a group must agree on the sizes, and on
whether the tensor requires gradients, because backward is a collective, too. By default, gradients are those of one
process with all data, whose loss is the sum of the ranks' losses. Results share memory with inputs only if a collective
does nothing, and no tensor is saved for backward.

Dimensions may be negative. `sizes` are the lengths of the shares along `dim`, one for each rank. None means equal
lengths. A tensor that contradicts its sizes raises ValueError. Uneven shares are padded except in `all_to_all`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.parallel.shares import Parts

# Renamed in torch 2.13; earlier versions have only the older names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = dist.ProcessGroup | None
Sizes = tuple[int, ...]
GradScale = Literal["up", "down"] | None

Exchange = Callable[[Tensor, Parts], Tensor]
"""All-to-all of flat tensors without gradients: function from the sent tensor to the received one."""

Cut = tuple[int, Sizes]
"""Dimension, and the length of each rank's share along it."""


def all_gather(x: Tensor, group: Group, *, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Return the shares of all ranks, joined along `dim` in the order of ranks; the gradients of all are summed."""
    if _alone(group):
        return x
    dim, sizes = dim % x.ndim, _shares_of(x, group, dim, sizes)
    return _apply(
        x,
        partial(_gathered, group=group, dim=dim, sizes=sizes),
        partial(reduce_scatter, group=group, dim=dim, sizes=sizes),
    )


def reduce_scatter(x: Tensor, group: Group, *, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Return this rank's share of the sum over all ranks of `x`, which has the same shape on all ranks."""
    if _alone(group):
        return x
    dim, sizes = dim % x.ndim, _of_whole(x, dist.get_world_size(group), dim, sizes)
    return _apply(
        x, partial(_reduced, group=group, dim=dim, sizes=sizes), partial(all_gather, group=group, dim=dim, sizes=sizes)
    )


def all_to_all(
    input_: Tensor,
    process_group: Group,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    *,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    exchange: Exchange | None = None,
) -> Tensor:
    """Divide a tensor along one dimension, and join its shares along another.

    `input_` is whole along `scatter_dim`, and this rank's share along `gather_dim`. `exchange` sends the parts. None
    means that every rank sends to every other. Raises ValueError if both dimensions are the same.
    """
    if process_group is None or _alone(process_group):
        return input_
    scatter, gather = scatter_dim % input_.ndim, gather_dim % input_.ndim
    if scatter == gather:
        raise ValueError(f"dimension {scatter} cannot be divided and joined at once")
    scattered = _of_whole(input_, dist.get_world_size(process_group), scatter, scatter_sizes)
    gathered = _shares_of(input_, process_group, gather, gather_sizes)
    exchange, rank = exchange or partial(exchange_directly, process_group), dist.get_rank(process_group)
    return exchange_all(exchange, rank, (scatter, scattered), (gather, gathered), input_)[0]


def exchange_all(exchange: Exchange, rank: int, scatter: Cut, gather: Cut, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the results of `all_to_all` for tensors of one shape, in one exchange, which has gradients."""

    def there(*tensors: Tensor) -> tuple[Tensor, ...]:
        (cut_dim, sizes), (joined_dim, joined_sizes), shape = scatter, gather, list(tensors[0].shape)
        row = None if len(shape) - 1 in (cut_dim, joined_dim) else shape[-1]
        others = prod(size for dim, size in enumerate(shape) if dim not in (cut_dim, joined_dim))
        shape[cut_dim], shape[joined_dim] = sizes[rank], sum(joined_sizes)
        parts = Parts(len(tensors) * others, joined_sizes, sizes, row)
        received = exchange(_pack(tensors, sizes, cut_dim), parts)
        return _unpack(received, shape, joined_sizes, joined_dim, count=len(tensors))

    out: tuple[Tensor, ...] = _ThereAndBack.apply(  # type: ignore[no-untyped-call]
        there, partial(exchange_all, exchange, rank, gather, scatter), *tensors
    )
    return out


def gather_forward_split_backward(
    input_: Tensor, dim: int, process_group: Group, grad_scale: GradScale = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Join the shares of all ranks along `dim`; in backward, take this rank's share of the gradient.

    Use this if all ranks compute the same from the whole, and its loss counts once; `all_gather` sums gradients.
    `grad_scale` `up` multiplies the gradient by the number of ranks, and `down` divides it.
    """
    if _alone(process_group):
        return input_
    dim, sizes = dim % input_.ndim, _shares_of(input_, process_group, dim, sizes)

    def back(gradient: Tensor) -> Tensor:
        gradient = split_forward_gather_backward(gradient, dim, process_group, sizes=sizes)
        return _scaled(gradient, grad_scale, process_group)

    return _apply(input_, partial(_gathered, group=process_group, dim=dim, sizes=sizes), back)


def split_forward_gather_backward(
    input_: Tensor, dim: int, process_group: Group, grad_scale: GradScale = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Take this rank's share along `dim` of a tensor that all ranks hold; in backward, join the gradients of all ranks.

    `input_` is the same on all ranks. `grad_scale` is the same as in `gather_forward_split_backward`.
    """
    if _alone(process_group):
        return input_
    dim, sizes = dim % input_.ndim, _of_whole(input_, dist.get_world_size(process_group), dim, sizes)

    def back(gradient: Tensor) -> Tensor:
        gradient = gather_forward_split_backward(gradient, dim, process_group, sizes=sizes)
        return _scaled(gradient, grad_scale, process_group)

    def own(whole: Tensor) -> Tensor:
        # Copy because a view would keep the whole tensor alive.
        share = torch.split(whole, list(sizes), dim)[dist.get_rank(process_group)]
        return share.clone(memory_format=torch.contiguous_format)

    return _apply(input_, own, back)


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """Return the sum over all ranks; the gradient passes unchanged, as after a linear layer with divided inputs."""

    def total(x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    return x if _alone(group) else _apply(x, total, partial(copy_to_group, group=group))


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Return `x` unchanged; the gradients of all ranks are summed, as before a linear layer with divided outputs."""
    return x if _alone(group) else _apply(x, lambda x: x.view_as(x), partial(all_reduce_sum, group=group))


class _ThereAndBack(torch.autograd.Function):
    """Function that calls `there` in forward, and `back`, which is differentiable itself, on the gradients."""

    @staticmethod
    def forward(ctx: Any, there: Callable[..., Any], back: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.back = back
        return there(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back = ctx.back(*gradients)
        return None, None, *((back,) if isinstance(back, Tensor) else back)


def _apply(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    out: Tensor = _ThereAndBack.apply(there, back, x)  # type: ignore[no-untyped-call]
    return out


def exchange_directly(group: dist.ProcessGroup, sent: Tensor, parts: Parts) -> Tensor:
    """Exchange parts as an `Exchange` in which every rank of a group sends to every other."""
    rank = dist.get_rank(group)
    return exchange_flat(sent, parts.sent(rank), parts.received(rank), group)


def exchange_flat(sent: Tensor, lengths: list[int], expected: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send every rank its part of a flat tensor, of `lengths` elements, and return the `expected` received parts."""
    received = sent.new_empty(sum(expected))
    dist.all_to_all_single(as_bytes(received), as_bytes(sent), expected, lengths, group=group)
    return received


def _pack(tensors: tuple[Tensor, ...], sizes: Sizes, dim: int) -> Tensor:
    """Return the parts of tensors along `dim` for one rank after the other, flat."""
    first = tensors[0]
    if len(tensors) == 1 and first.is_contiguous() and prod(first.shape[:dim]) == 1:
        return first.view(-1)  # the parts are in this order already
    of_ranks = zip(*(torch.split(tensor, list(sizes), dim) for tensor in tensors), strict=True)
    pieces = [piece for of_rank in of_ranks for piece in of_rank]
    flat: Tensor = first.new_empty(sum(piece.numel() for piece in pieces))
    for place, piece in zip(torch.split(flat, [piece.numel() for piece in pieces]), pieces, strict=True):
        place.view(piece.shape).copy_(piece)
    return flat


def _unpack(flat: Tensor, shape: Sequence[int], sizes: Sizes, dim: int, *, count: int) -> tuple[Tensor, ...]:
    """Return `count` tensors of `shape` from their parts along `dim` in `flat`; inverse of `_pack`."""
    if count == 1 and prod(shape[:dim]) == 1:
        return (flat.view(shape),)
    shapes = [(count, *shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
    pieces = torch.split(flat, [prod(part) for part in shapes])
    parts = [piece.view(part) for piece, part in zip(pieces, shapes, strict=True)]
    return tuple(torch.cat([part[index] for part in parts], dim) for index in range(count))


def _gathered(x: Tensor, *, group: Group, dim: int, sizes: Sizes) -> Tensor:
    padded = _with_length(x, dim, max(sizes))
    flat = padded.new_empty(len(sizes) * padded.numel())
    all_gather_single(as_bytes(flat), as_bytes(padded.view(-1)), group=group)
    if min(sizes) == max(sizes):
        return _unpack(flat, (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]), sizes, dim, count=1)[0]
    parts = flat.view(len(sizes), *padded.shape)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


def _reduced(x: Tensor, *, group: Group, dim: int, sizes: Sizes) -> Tensor:
    longest = max(sizes)
    shape = (*x.shape[:dim], longest, *x.shape[dim + 1 :])
    own = x.new_empty(shape)
    if min(sizes) == longest:
        sent = _pack((x,), sizes, dim)
    else:
        sent = torch.cat([_with_length(piece, dim, longest).view(-1) for piece in torch.split(x, list(sizes), dim)])
    reduce_scatter_single(own.view(-1), sent, group=group)
    return own.narrow(dim, 0, sizes[dist.get_rank(group)]).contiguous()


def as_bytes(flat: Tensor) -> Tensor:
    """Return a tensor of one-byte elements as uint8 because gloo does not support fp8; others unchanged."""
    return flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat


def _with_length(x: Tensor, dim: int, length: int) -> Tensor:
    if x.shape[dim] == length:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = length
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded


def _alone(group: Group) -> bool:
    return group is None or dist.get_world_size(group) == 1


def _of_whole(x: Tensor, ranks: int, dim: int, sizes: Sequence[int] | None) -> Sizes:
    total = x.shape[dim]
    if sizes is None:
        if total % ranks:
            raise ValueError(f"{total} along dimension {dim} are not {ranks} equal shares: name the sizes")
        return (total // ranks,) * ranks
    if len(sizes) != ranks or sum(sizes) != total:
        raise ValueError(f"sizes={tuple(sizes)} are not those of {total} along dimension {dim} over {ranks} ranks")
    return tuple(sizes)


def _shares_of(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> Sizes:
    ranks, rank, own = dist.get_world_size(group), dist.get_rank(group), x.shape[dim]
    if sizes is None:
        return (own,) * ranks
    if len(sizes) != ranks or sizes[rank] != own:
        raise ValueError(f"sizes={tuple(sizes)} are not those of {ranks} ranks of which rank {rank} has {own}")
    return tuple(sizes)


def _scaled(gradient: Tensor, grad_scale: GradScale, group: Group) -> Tensor:
    ranks = dist.get_world_size(group)
    return gradient if grad_scale is None else gradient * (ranks if grad_scale == "up" else 1.0 / ranks)
