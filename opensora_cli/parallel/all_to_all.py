"""All-to-all for slow or different links: in two stages over machines, and with fewer bytes on the wire."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.parallel.collectives import (
    Group,
    Parts,
    all_to_all,
    as_bytes,
    exchange_flat,
    exchange_with_gradient,
)
from opensora_cli.parallel.mesh import ParallelMesh

if TYPE_CHECKING:
    from opensora_cli.parallel.scheduling import BandwidthMonitor

WireFormat = Literal["bf16", "fp8"]
"""Format of elements on the wire: `bf16` has two bytes each; `fp8` has one (e4m3), and four per row for a scale."""

_FP8 = torch.float8_e4m3fn
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePlan:
    """Plan for exchanging tokens for heads between the ranks of a group."""

    inner: int = 1
    """Number of consecutive ranks with fast links. Over 1, exchanges have two stages: inside and between them."""
    wire: WireFormat | None = None
    """Format that elements are rounded to for the exchange. None means no rounding."""
    chunks: int = 1
    """Number of groups of heads. Each is exchanged while attention of the previous group is computed."""

    def stage_bytes(self, parts: Parts, itemsize: int) -> dict[str, int]:
        """Return the bytes that all ranks send in one exchange: in total, or inside and between groups of `inner`.

        `itemsize` is that of the tensor, in bytes. Raises ValueError like `wire_parts`.
        """
        parts = wire_parts(parts, self.wire)
        itemsize = {None: itemsize, "bf16": 2, "fp8": 1}[self.wire]
        ranks = range(len(parts.sources))
        pairs = [(source, target, itemsize * parts.length(source, target)) for source in ranks for target in ranks]
        if self.inner == 1:
            return {"sent": sum(size for source, target, size in pairs if source != target)}
        return {
            "inside": sum(size for source, target, size in pairs if (source - target) % self.inner),
            "between": sum(size for source, target, size in pairs if source // self.inner != target // self.inner),
        }


class Route(Protocol):
    """Route of parts to their ranks: an `Exchange` of elements without rounding."""

    def __call__(self, sent: Tensor, parts: Parts, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Direct:
    """Route in which every rank of a group sends to every other."""

    group: dist.ProcessGroup
    monitor: "BandwidthMonitor | None" = None

    def __call__(self, sent: Tensor, parts: Parts, /) -> Tensor:
        """Return what came."""
        rank = dist.get_rank(self.group)
        return _measured(self.monitor, sent, parts.sent(rank), parts.received(rank), self.group)

    def begin(self, sent: Tensor, parts: Parts) -> tuple[Tensor, Callable[[], dist.Work]]:
        """Return the tensor for the result, and a function that starts the exchange and returns its handle."""
        rank = dist.get_rank(self.group)
        expected = parts.received(rank)
        received = sent.new_empty(sum(expected))
        start = partial(
            dist.all_to_all_single,
            as_bytes(received),
            as_bytes(sent),
            expected,
            parts.sent(rank),
            group=self.group,
            async_op=True,
        )
        return received, start


@dataclass(frozen=True, slots=True)
class TwoStages:
    """Route in two stages: a rank sends parts for place p of any machine to place p of its own, which forwards them."""

    local_group: dist.ProcessGroup
    node_group: dist.ProcessGroup
    monitor: "BandwidthMonitor | None" = None

    def __call__(self, sent: Tensor, parts: Parts, /) -> Tensor:
        """Return what came."""
        inner, place, node = (
            dist.get_world_size(self.local_group),
            dist.get_rank(self.local_group),
            dist.get_rank(self.node_group),
        )
        places, nodes = range(inner), range(dist.get_world_size(self.node_group))

        # Length of the part from one place of one node to another.
        def length(from_node: int, from_place: int, to_node: int, to_place: int) -> int:
            return parts.length(from_node * inner + from_place, to_node * inner + to_place)

        pieces = torch.split(sent, parts.sent(node * inner + place))
        by_place = torch.cat([pieces[n * inner + p] for p in places for n in nodes])
        del sent, pieces
        of_machine = _measured(
            self.monitor,
            by_place,
            [sum(length(node, place, n, p) for n in nodes) for p in places],
            [sum(length(node, p, n, place) for n in nodes) for p in places],
            self.local_group,
        )
        del by_place
        came = torch.split(of_machine, [length(node, p, n, place) for p in places for n in nodes])
        by_node = torch.cat([came[p * len(nodes) + n] for n in nodes for p in places])
        del of_machine, came
        return _measured(
            self.monitor,
            by_node,
            [sum(length(node, p, n, place) for p in places) for n in nodes],
            [sum(length(n, p, node, place) for p in places) for n in nodes],
            self.node_group,
        )


def _measured(
    monitor: "BandwidthMonitor | None", sent: Tensor, lengths: list[int], expected: list[int], group: dist.ProcessGroup
) -> Tensor:
    stays = lengths[dist.get_rank(group)]
    nbytes = (sent.numel() - stays) * sent.itemsize
    with nullcontext() if monitor is None else monitor.observe(group, nbytes, device=sent.device):
        return exchange_flat(sent, lengths, expected, group)


def compressed(route: Route, wire: WireFormat | None, sent: Tensor, parts: Parts) -> Tensor:
    """Exchange parts through `route`, with elements rounded to `wire`, as an `Exchange`.
    Raises ValueError like `wire_parts`.
    """
    if wire is None:
        return route(sent, parts)
    return unpacked(route(to_wire(sent, parts, wire), wire_parts(parts, wire)), parts, wire, dtype=sent.dtype)


def wire_parts(parts: Parts, wire: WireFormat | None) -> Parts:
    """Return the parts for the result of `to_wire`. Raises ValueError for `fp8` if rows are divided or joined."""
    if wire != "fp8":
        return parts
    if parts.row is None:
        raise ValueError("rows of fp8 lie along the last dimension, which can be neither divided nor joined")
    return parts._replace(unit=parts.unit // parts.row * (parts.row + _SCALE_BYTES))


def to_wire(sent: Tensor, parts: Parts, wire: WireFormat) -> Tensor:
    """Return flat elements in the format of the wire."""
    if wire == "bf16":
        return sent.to(torch.bfloat16)
    wire_parts(parts, wire)  # raises
    values, scales = quantize(sent.view(-1, parts.row or 1))
    # Values and scales share a message because a second one would cost its latency again.
    return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=-1).view(-1)


def unpacked(received: Tensor, parts: Parts, wire: WireFormat, *, dtype: torch.dtype) -> Tensor:
    """Return the elements from the format of the wire; inverse of `to_wire`."""
    if wire == "bf16":
        return received.to(dtype)
    rows = received.view(-1, (parts.row or 1) + _SCALE_BYTES)
    values, scales = rows[:, :-_SCALE_BYTES], rows[:, -_SCALE_BYTES:].contiguous()
    return (values.view(_FP8).float() * scales.view(torch.float32)).to(dtype).view(-1)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp8 values, and the fp32 scale of each row (..., 1) as a factor for them; the largest value becomes 448.

    Rows are along the last dimension, and have at least one element.
    """
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    # A row of zeros would divide by zero.
    scales = (largest / torch.finfo(_FP8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scales).to(_FP8), scales


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
    """Return the result of `all_to_all` with elements and gradients that are rounded for the exchange.

    The error of an element x of an fp32 tensor is at most |x| / 256 with `bf16`. With `fp8` it is at most |x| / 16, or
    2^-18 of the largest element of its row if that is more; a row is along the last dimension. A row with an infinity
    or NaN arrives as NaN with `fp8`. `bf16` saves nothing for a 16-bit tensor. `wire` None means no rounding. Raises
    ValueError if the sizes are wrong, or if one of the dimensions is the last one, which `fp8` keeps whole.
    """
    if process_group is None or wire is None:
        return all_to_all(
            input_, process_group, scatter_dim, gather_dim, scatter_sizes=scatter_sizes, gather_sizes=gather_sizes
        )
    ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if ranks == 1:
        return input_
    exchange = partial(compressed, Direct(process_group), wire)
    return exchange_with_gradient(exchange, ranks, rank, input_, scatter_dim, gather_dim, scatter_sizes, gather_sizes)


def node_groups(group: dist.ProcessGroup, *, ranks_per_node: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Create the groups of `hierarchical_all_to_all`: the ranks on this machine, and ranks with this place on each.

    All ranks of the run must call this. The ranks of `group` must be ordered machine by machine.

    Raises:
        ValueError: The machines have different numbers of ranks.
        AbsentRanks: Some ranks did not call this.
    """
    from opensora_cli.parallel.rendezvous import group_with

    ranks = dist.get_process_group_ranks(group)
    if len(ranks) % ranks_per_node:
        raise ValueError(f"{len(ranks)} ranks are not machines of {ranks_per_node} each")
    node, place = divmod(dist.get_rank(group), ranks_per_node)
    local = group_with(ranks[node * ranks_per_node : (node + 1) * ranks_per_node])
    return local, group_with(ranks[place::ranks_per_node])


def open_route(mesh: ParallelMesh, plan: ExchangePlan, monitor: "BandwidthMonitor | None" = None) -> Route:
    """Return the route between the Ulysses ranks of a mesh. With two stages, all ranks of the run must call this.

    `monitor` gets the time of every exchange, or of each of its two stages, under the name of its group.
    """
    if plan.inner == 1:
        group = mesh.group("ulysses")
        route: Route = Direct(group, monitor)
        names = {"ulysses": group}
    else:
        local_group, node_group = mesh.stages("ulysses", inner=plan.inner)
        route = TwoStages(local_group, node_group, monitor)
        names = {"ulysses inside": local_group, "ulysses between": node_group}
    if monitor is not None:
        for name, each in names.items():
            monitor.name(each, name)
    return route


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
    """Return the result of `all_to_all` among all ranks of several machines, bitwise identical, forward and backward.

    Ranks are numbered machine by machine. Each sends its parts for place l of any machine to place l of its own
    machine, which sends every machine one message with the parts of all its ranks. So between M machines of L ranks,
    each rank sends M - 1 messages, instead of L (M - 1) messages with an L-th of the size. Inside a machine, data is
    sent twice.

    `node_groups` creates both groups. Sizes have an entry for each of all ranks. `wire` is the same as in
    `compressed_all_to_all`, and the other arguments are the same as in `all_to_all`.
    """
    inner, outer = dist.get_world_size(local_group), dist.get_world_size(node_group)
    if inner * outer == 1:
        return input_
    rank = dist.get_rank(node_group) * inner + dist.get_rank(local_group)
    exchange = partial(compressed, TwoStages(local_group, node_group), wire)
    return exchange_with_gradient(
        exchange, inner * outer, rank, input_, scatter_dim, gather_dim, scatter_sizes, gather_sizes
    )
