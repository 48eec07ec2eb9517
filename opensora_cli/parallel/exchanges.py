"""Exchanges for slow links: all-to-all in two stages, inside machines and between them, and with rounded elements."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.parallel.collectives import Exchange, exchange_flat
from opensora_cli.parallel.mesh import ParallelMesh
from opensora_cli.parallel.shares import SCALE_BYTES, ExchangePlan, Parts, WireFormat

_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class TwoStages:
    """`Exchange` of the ranks of several machines, which are numbered machine by machine.

    Each rank sends its parts for place p of any machine to place p of its own machine, which sends every machine one
    message with the parts of all its ranks. So between M machines of L ranks, each rank sends M - 1 messages, instead
    of L (M - 1) messages with an L-th of the size. Inside a machine, data is sent twice.

    `local_group` has the ranks of this machine, and `node_group` the ranks with this place on every machine, as from
    `ParallelMesh.stages`.
    """

    local_group: dist.ProcessGroup
    node_group: dist.ProcessGroup

    def __call__(self, sent: Tensor, parts: Parts, /) -> Tensor:
        """Return the received parts."""
        inner, place = dist.get_world_size(self.local_group), dist.get_rank(self.local_group)
        node, places = dist.get_rank(self.node_group), range(inner)
        nodes = range(dist.get_world_size(self.node_group))

        # Length of the part from one place of one node to another.
        def length(from_node: int, from_place: int, to_node: int, to_place: int) -> int:
            return parts.length(from_node * inner + from_place, to_node * inner + to_place)

        pieces = torch.split(sent, parts.sent(node * inner + place))
        by_place = torch.cat([pieces[n * inner + p] for p in places for n in nodes])
        del sent, pieces
        of_machine = exchange_flat(
            by_place,
            [sum(length(node, place, n, p) for n in nodes) for p in places],
            [sum(length(node, p, n, place) for n in nodes) for p in places],
            self.local_group,
        )
        del by_place
        came = torch.split(of_machine, [length(node, p, n, place) for p in places for n in nodes])
        by_node = torch.cat([came[p * len(nodes) + n] for n in nodes for p in places])
        del of_machine, came
        return exchange_flat(
            by_node,
            [sum(length(node, p, n, place) for p in places) for n in nodes],
            [sum(length(n, p, node, place) for p in places) for n in nodes],
            self.node_group,
        )


def open_stages(mesh: ParallelMesh, plan: ExchangePlan) -> TwoStages | None:
    """Return the exchange in two stages between the Ulysses ranks of a mesh, or None if `plan` has one stage.

    All ranks of the run must call this.
    """
    return TwoStages(*mesh.stages("ulysses", inner=plan.inner)) if plan.inner > 1 else None


def compressed(exchange: Exchange, wire: WireFormat | None, sent: Tensor, parts: Parts) -> Tensor:
    """Exchange parts through `exchange`, with elements rounded to `wire`. None means no rounding.

    The error of an element x of an fp32 tensor is at most |x| / 256 with `bf16`. With `fp8` it is at most |x| / 16, or
    2^-18 of the largest element of its row if that is more; a row is along the last dimension. A row with an infinity
    or NaN arrives as NaN with `fp8`. `bf16` saves nothing for a 16-bit tensor. Raises ValueError like `Parts.on_wire`.
    """
    if wire is None:
        return exchange(sent, parts)
    return unpacked(exchange(to_wire(sent, parts, wire), parts.on_wire(wire)), parts, wire, dtype=sent.dtype)


def to_wire(sent: Tensor, parts: Parts, wire: WireFormat) -> Tensor:
    """Return flat elements in the format of the wire. Raises ValueError like `Parts.on_wire`."""
    if wire == "bf16":
        return sent.to(torch.bfloat16)
    parts.on_wire(wire)
    values, scales = _quantize(sent.view(-1, parts.row or 1))
    # Values and scales share a message because a second one would cost its latency again.
    return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=-1).view(-1)


def unpacked(received: Tensor, parts: Parts, wire: WireFormat, *, dtype: torch.dtype) -> Tensor:
    """Return the elements from the format of the wire; inverse of `to_wire`."""
    if wire == "bf16":
        return received.to(dtype)
    rows = received.view(-1, (parts.row or 1) + SCALE_BYTES)
    values, scales = rows[:, :-SCALE_BYTES], rows[:, -SCALE_BYTES:].contiguous()
    return (values.view(_FP8).float() * scales.view(torch.float32)).to(dtype).view(-1)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp8 values, and the fp32 scale of each row (..., 1) as a factor for them; the largest value becomes 448.

    Rows are along the last dimension, and have at least one element.
    """
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    # A row of zeros would divide by zero.
    scales = (largest / torch.finfo(_FP8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scales).to(_FP8), scales
