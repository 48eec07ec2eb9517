"""All-to-all in two stages, inside machines and between them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.parallel.collectives import exchange_flat
from opensora_cli.parallel.mesh import ParallelMesh
from opensora_cli.parallel.shares import ExchangePlan, Parts


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
