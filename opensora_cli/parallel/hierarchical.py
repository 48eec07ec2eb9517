"""All-to-all for several machines: first inside each, then between them, in few large messages."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.parallel.collectives import (
    Sizes,
    elements_beside,
    exchange_flat,
    exchange_with_gradient,
    joined,
)
from opensora_cli.parallel.compressed import WireFormat, compress
from opensora_cli.parallel.meeting import group_with


def node_groups(group: dist.ProcessGroup, *, ranks_per_node: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make the two groups of `hierarchical_all_to_all`; all ranks of the run must call it together.

    Args:
        group: its ranks follow one another machine by machine; other ranks have others.
        ranks_per_node: how many of them each machine has.

    Returns:
        The ranks on this rank's machine, and those with its place on every machine.

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

    Ranks are numbered machine by machine. Each hands what is for place l of any machine to its neighbour at place l,
    which sends every machine one message with what all of its own wrote. So between M machines of L ranks each rank
    sends M - 1 messages, instead of L (M - 1) of which each has an L-th of the size. Inside a machine everything
    travels once more.

    Args:
        input_: as for `all_to_all`, which describes the others too.
        local_group: the ranks on this machine, in the same order on each.
        node_group: the ranks with this one's place on every machine; `node_groups` makes both.
        scatter_dim: is divided.
        gather_dim: is joined.
        scatter_sizes: the lengths of the shares along `scatter_dim`, one for each of all ranks.
        gather_sizes: the same along `gather_dim`.
        wire: how elements travel, as for `compressed_all_to_all`; None: as they are.

    Raises:
        ValueError: the tensor does not have the sizes it should have.
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
    of_neighbours = exchange_flat(
        by_place,
        [sum(length(node, place, n, p) for n in nodes) for p in places],
        [sum(length(node, p, n, place) for n in nodes) for p in places],
        local_group,
    )
    parts = torch.split(of_neighbours, [length(node, p, n, place) for p in places for n in nodes])
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
