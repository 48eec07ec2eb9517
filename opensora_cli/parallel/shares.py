"""How a whole is divided between ranks: which sizes, where each share lies, and the tokens that each rank holds."""

from collections.abc import Sequence

from opensora_cli.parallel.mesh import ParallelMesh


def shares(total: int, parts: int) -> tuple[int, ...]:
    """Return `parts` sizes that add up to `total`, as equal as can be, the larger ones first: 7 in 3 is (3, 2, 2).

    With a total under `parts` the last shares are empty. Raises ValueError if `total` is negative, or `parts` under 1.
    """
    if total < 0 or parts < 1:
        raise ValueError(f"{total} cannot be divided into {parts} shares")
    size, rest = divmod(total, parts)
    return (size + 1,) * rest + (size,) * (parts - rest)


def span(sizes: Sequence[int], rank: int) -> slice:
    """Return where the share of `rank` lies in the whole, if the shares follow one another in the order of ranks."""
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


class SequenceLengths:
    """The tokens of the joint sequence that each rank holds at present, for the attention between them.

    One object is shared: what cuts the sequence sets it, and what computes the attention reads it. `ring` and `ulysses`
    are the ranks along the mesh's axes of these names, from 1. Raises ValueError if there is no such place as
    `ring_rank`.
    """

    def __init__(self, *, ring: int, ulysses: int, ring_rank: int) -> None:
        if not 0 <= ring_rank < ring or ulysses < 1:
            raise ValueError(f"ring={ring}, ulysses={ulysses}, ring_rank={ring_rank} fit no mesh")
        self.ring = ring
        self.ulysses = ulysses
        self._ring_rank = ring_rank
        self._of_ranks: tuple[int, ...] = ()

    @classmethod
    def of_mesh(cls, mesh: ParallelMesh) -> "SequenceLengths":
        """Return the holder for this rank of a mesh, still empty."""
        return cls(ring=mesh.shape.ring, ulysses=mesh.shape.ulysses, ring_rank=mesh.coordinate("ring"))

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """The tokens of each rank, those of one ring place after those of another."""
        return self._of_ranks

    @of_ranks.setter
    def of_ranks(self, lengths: tuple[int, ...]) -> None:
        if len(lengths) != self.ring * self.ulysses:
            raise ValueError(f"{lengths} are not the tokens of {self.ring} x {self.ulysses} ranks")
        self._of_ranks = lengths

    @property
    def of_ulysses(self) -> tuple[int, ...]:
        """The tokens of each rank of this one's Ulysses group."""
        return self._of_place(self._ring_rank)

    @property
    def of_ring(self) -> tuple[int, ...]:
        """The tokens at each place of the ring: those of a whole Ulysses group."""
        return tuple(sum(self._of_place(place)) for place in range(self.ring))

    def _of_place(self, place: int) -> tuple[int, ...]:
        return self._of_ranks[place * self.ulysses : (place + 1) * self.ulysses]
