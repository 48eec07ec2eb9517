"""Division of work between ranks, in numbers: shares, meshes and exchanges. Nothing here communicates."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from opensora_cli.parallel.mesh import ParallelMesh

AXES = ("replicate", "shard", "guidance", "ring", "ulysses", "tensor")
"""Axes, outermost first. Ranks of `tensor` exchange the most, so that they are adjacent and on the same machine."""

WireFormat = Literal["bf16", "fp8"]
"""Format of elements on the wire: `bf16` has two bytes each; `fp8` has one (e4m3), and four per row for a scale."""
SCALE_BYTES = 4
"""Size of the scale of a row of fp8."""


def shares(total: int, parts: int) -> tuple[int, ...]:
    """Return `parts` sizes that add up to `total`, as equal as possible, larger ones first: 7 in 3 is (3, 2, 2).

    With a total under `parts` the last shares are empty.
    """
    size, rest = divmod(total, parts)
    return (size + 1,) * rest + (size,) * (parts - rest)


def span(sizes: Sequence[int], rank: int) -> slice:
    """Return the slice of the share of `rank` in the whole, if shares are in the order of ranks."""
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Number of ranks along each axis of a mesh, at least 1."""

    replicate: int = 1
    """Data-parallel copies of the weights."""
    shard: int = 1
    """Data-parallel ranks that divide the weights of a copy."""
    guidance: int = 1
    """Ranks that divide the branches of classifier-free guidance."""
    ring: int = 1
    """Ranks of ring attention."""
    ulysses: int = 1
    """Ranks of Ulysses attention."""
    tensor: int = 1
    """Ranks that divide the heads and features of each block."""

    @property
    def size(self) -> int:
        return prod(astuple(self))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank along each axis, from 0; the last axis varies fastest."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found


class Parts(NamedTuple):
    """Lengths of an all-to-all: rank s sends rank t `unit * sources[s] * targets[t]` elements.

    The parts of a rank are in one flat tensor, in the order of ranks, before and after.
    """

    unit: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    row: int | None
    """Number of elements along the last dimension, which parts keep whole. None means that parts divide it."""

    def length(self, source: int, target: int) -> int:
        return self.unit * self.sources[source] * self.targets[target]

    def sent(self, rank: int) -> list[int]:
        return [self.length(rank, target) for target in range(len(self.targets))]

    def received(self, rank: int) -> list[int]:
        return [self.length(source, rank) for source in range(len(self.sources))]

    def on_wire(self, wire: WireFormat | None) -> "Parts":
        """Return the parts for elements in a format. Raises ValueError for `fp8` if rows are divided or joined."""
        if wire != "fp8":
            return self
        if self.row is None:
            raise ValueError("rows of fp8 lie along the last dimension, which can be neither divided nor joined")
        return self._replace(unit=self.unit // self.row * (self.row + SCALE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePlan:
    """Plan for exchanging tokens for heads between the ranks of a group."""

    inner: int = 1
    """Number of consecutive ranks with fast links. Over 1, exchanges have two stages: inside and between them."""
    wire: WireFormat | None = None
    """Format that elements are rounded to for the exchange. None means no rounding."""

    def stage_bytes(self, parts: Parts, itemsize: int) -> dict[str, int]:
        """Return the bytes that all ranks send in one exchange: in total, or inside and between groups of `inner`.

        `itemsize` is that of the tensor, in bytes. Raises ValueError like `Parts.on_wire`.
        """
        parts = parts.on_wire(self.wire)
        itemsize = {None: itemsize, "bf16": 2, "fp8": 1}[self.wire]
        ranks = range(len(parts.sources))
        pairs = [(source, target, itemsize * parts.length(source, target)) for source in ranks for target in ranks]
        if self.inner == 1:
            return {"sent": sum(size for source, target, size in pairs if source != target)}
        return {
            "inside": sum(size for source, target, size in pairs if (source - target) % self.inner),
            "between": sum(size for source, target, size in pairs if source // self.inner != target // self.inner),
        }


@dataclass(slots=True)
class SequenceLengths:
    """Numbers of tokens of the joint sequence that each rank currently holds, for attention between ranks.

    The code that cuts the sequence sets `of_ranks`, and attention reads it.
    """

    ring: int
    ulysses: int
    """Numbers of ranks along these axes of the mesh, at least 1."""
    ring_rank: int
    of_ranks: tuple[int, ...] = ()
    """Number of tokens of each rank, ordered by ring place."""

    @classmethod
    def of_mesh(cls, mesh: "ParallelMesh") -> "SequenceLengths":
        """Return the object for this rank of a mesh, without lengths."""
        return cls(mesh.shape.ring, mesh.shape.ulysses, mesh.coordinate("ring"))

    @property
    def of_ulysses(self) -> tuple[int, ...]:
        """Number of tokens of each rank in this rank's Ulysses group."""
        return self._of_place(self.ring_rank)

    @property
    def of_ring(self) -> tuple[int, ...]:
        """Number of tokens at each place of the ring, that is, of a whole Ulysses group."""
        return tuple(sum(self._of_place(place)) for place in range(self.ring))

    def _of_place(self, place: int) -> tuple[int, ...]:
        return self.of_ranks[place * self.ulysses : (place + 1) * self.ulysses]
