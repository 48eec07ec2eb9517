"""All-to-all for links that differ or are slow: in two stages over machines, and with fewer bytes on the wire."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.parallel.collectives import (
    Exchange,
    Group,
    Sizes,
    all_to_all,
    elements_beside,
    exchange_flat,
    exchange_once,
    exchange_with_gradient,
    joined,
)
from opensora_cli.parallel.rendezvous import group_with

WireFormat = Literal["bf16", "fp8"]
"""`bf16` is two bytes an element; `fp8` is one (e4m3), and four for the scale of each row."""

_FP8 = torch.float8_e4m3fn
_SCALE_BYTES = 4


def compressed_all_to_all(
    input_: Tensor,
    process_group: Group,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    *,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    wire: WireFormat | None = None,
) -> Tensor:
    """Do what `all_to_all` does, with elements and gradients that are rounded for the way.

    An element x of an fp32 tensor comes out wrong by at most |x| / 256 with `bf16`. With `fp8` it is at most |x| / 16,
    or 2^-18 of the largest element of its row, whichever is more; a row is what lies along the last dimension. A row
    that holds an infinity or NaN arrives as NaN with `fp8`. Of a 16-bit tensor `bf16` saves nothing. With `wire` None
    elements travel as they are. Raises ValueError if the sizes are wrong, or one of the dimensions is the last one,
    which `fp8` keeps whole.
    """
    if process_group is None or wire is None:
        return all_to_all(
            input_, process_group, scatter_dim, gather_dim, scatter_sizes=scatter_sizes, gather_sizes=gather_sizes
        )
    ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if ranks == 1:
        return input_
    exchange = compress(partial(exchange_once, process_group), wire)
    return exchange_with_gradient(exchange, ranks, rank, input_, scatter_dim, gather_dim, scatter_sizes, gather_sizes)


def compress(exchange: Exchange, wire: WireFormat | None) -> Exchange:
    """Return an exchange that rounds what it hands to `exchange`; None: the same exchange."""
    match wire:
        case None:
            return exchange
        case "bf16":
            return partial(_as_bf16, exchange)
        case "fp8":
            return partial(_as_fp8, exchange)


def _as_bf16(exchange: Exchange, x: Tensor, scatter: int, gather: int, scattered: Sizes, gathered: Sizes) -> Tensor:
    return exchange(x.to(torch.bfloat16), scatter, gather, scattered, gathered).to(x.dtype)


def _as_fp8(exchange: Exchange, x: Tensor, scatter: int, gather: int, scattered: Sizes, gathered: Sizes) -> Tensor:
    if x.ndim - 1 in (scatter, gather):
        raise ValueError(f"rows of fp8 lie along dimension {x.ndim - 1}, which can be neither divided nor joined")
    values, scales = quantise(x)
    # Values and scales share a message: a second one would cost its latency again.
    sent = torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=-1)
    received = exchange(sent, scatter, gather, scattered, gathered)
    values, scales = received[..., :-_SCALE_BYTES], received[..., -_SCALE_BYTES:].contiguous()
    return (values.view(_FP8).float() * scales.view(torch.float32)).to(x.dtype)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp8 values and the fp32 scale of each row (..., 1) by which to multiply them; the largest becomes 448.

    Rows lie along the last dimension, and have at least one element.
    """
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    # A row of zeros would divide by zero.
    scales = (largest / torch.finfo(_FP8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scales).to(_FP8), scales


def node_groups(group: dist.ProcessGroup, *, ranks_per_node: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make the groups of `hierarchical_all_to_all`: the ranks on this machine, and those with this place on each.

    All ranks of the run call this. Those of `group` follow one another machine by machine.

    Raises:
        ValueError: the machines do not have equally many ranks.
        AbsentRanks: these did not call it.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) % ranks_per_node:
        raise ValueError(f"{len(ranks)} ranks are not machines of {ranks_per_node} each")
    node, place = divmod(dist.get_rank(group), ranks_per_node)
    local = group_with(ranks[node * ranks_per_node : (node + 1) * ranks_per_node])
    return local, group_with(ranks[place::ranks_per_node])


def hierarchical_all_to_all(
    input_: Tensor,
    local_group: dist.ProcessGroup,
    node_group: dist.ProcessGroup,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    *,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    wire: WireFormat | None = None,
) -> Tensor:
    """Do what `all_to_all` does among all ranks of several machines, bit for bit, forward and backward.

    Ranks are numbered machine by machine. Each hands what is for place l of any machine to the rank at place l,
    which sends every machine one message with what all of its own wrote. So between M machines of L ranks each rank
    sends M - 1 messages, instead of L (M - 1) of which each has an L-th of the size. Inside a machine everything
    travels twice.

    `node_groups` makes both groups. Sizes have an entry for each of all ranks. `wire` is as for
    `compressed_all_to_all`, and all else as for `all_to_all`.
    """
    inner, outer = dist.get_world_size(local_group), dist.get_world_size(node_group)
    if inner * outer == 1:
        return input_
    rank = dist.get_rank(node_group) * inner + dist.get_rank(local_group)
    exchange = compress(partial(_exchange_twice, local_group, node_group), wire)
    return exchange_with_gradient(
        exchange, inner * outer, rank, input_, scatter_dim, gather_dim, scatter_sizes, gather_sizes
    )


def _exchange_twice(
    local_group: dist.ProcessGroup,
    node_group: dist.ProcessGroup,
    x: Tensor,
    scatter: int,
    gather: int,
    scattered: Sizes,
    gathered: Sizes,
) -> Tensor:
    inner, place, node = dist.get_world_size(local_group), dist.get_rank(local_group), dist.get_rank(node_group)
    places, nodes = range(inner), range(dist.get_world_size(node_group))
    others = elements_beside(x, scatter, gather)

    # Lengths of what goes from one place of one node to another.
    def length(from_node: int, from_place: int, to_node: int, to_place: int) -> int:
        return others * gathered[from_node * inner + from_place] * scattered[to_node * inner + to_place]

    pieces = torch.split(x, list(scattered), scatter)
    by_place = torch.cat([pieces[n * inner + p].reshape(-1) for p in places for n in nodes])
    of_machine = exchange_flat(
        by_place,
        [sum(length(node, place, n, p) for n in nodes) for p in places],
        [sum(length(node, p, n, place) for n in nodes) for p in places],
        local_group,
    )
    parts = torch.split(of_machine, [length(node, p, n, place) for p in places for n in nodes])
    by_node = torch.cat([parts[p * len(nodes) + n] for n in nodes for p in places])
    received = exchange_flat(
        by_node,
        [sum(length(node, p, n, place) for p in places) for n in nodes],
        [sum(length(n, p, node, place) for p in places) for n in nodes],
        node_group,
    )
    shape = list(x.shape)
    shape[scatter], shape[gather] = scattered[node * inner + place], sum(gathered)
    return joined(received, shape, gathered, gather)
