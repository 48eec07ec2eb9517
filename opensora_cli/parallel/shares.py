"""Shares of ranks: their sizes and positions in the whole, and the tokens that each rank holds."""

from collections.abc import Sequence

from opensora_cli.parallel.mesh import ParallelMesh


def shares(total: int, parts: int) -> tuple[int, ...]:
    """Return `parts` sizes that add up to `total`, as equal as possible, larger ones first: 7 in 3 is (3, 2, 2).

    With a total under `parts` the last shares are empty. Raises ValueError if `total` is negative, or `parts` under 1.
    """
    if total < 0 or parts < 1:
        raise ValueError(f"{total} cannot be divided into {parts} shares")
    size, rest = divmod(total, parts)
    return (size + 1,) * rest + (size,) * (parts - rest)


def span(sizes: Sequence[int], rank: int) -> slice:
    """Return the slice of the share of `rank` in the whole, if shares are in the order of ranks."""
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


class SequenceLengths:
    """Numbers of tokens of the joint sequence that each rank currently holds, for attention between ranks.

    The code that cuts the sequence sets this shared object, and attention reads it. `ring` and `ulysses` are the
    numbers of ranks along these axes of the mesh, at least 1. Raises ValueError if `ring_rank` is outside of the ring.
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
        """Return the object for this rank of a mesh, without lengths."""
        return cls(ring=mesh.shape.ring, ulysses=mesh.shape.ulysses, ring_rank=mesh.coordinate("ring"))

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """Number of tokens of each rank, ordered by ring place."""
        return self._of_ranks

    @of_ranks.setter
    def of_ranks(self, lengths: tuple[int, ...]) -> None:
        if len(lengths) != self.ring * self.ulysses:
            raise ValueError(f"{lengths} are not the tokens of {self.ring} x {self.ulysses} ranks")
        self._of_ranks = lengths

    @property
    def of_ulysses(self) -> tuple[int, ...]:
        """Number of tokens of each rank in this rank's Ulysses group."""
        return self._of_place(self._ring_rank)

    @property
    def of_ring(self) -> tuple[int, ...]:
        """Number of tokens at each place of the ring, that is, of a whole Ulysses group."""
        return tuple(sum(self._of_place(place)) for place in range(self.ring))

    def _of_place(self, place: int) -> tuple[int, ...]:
        return self._of_ranks[place * self.ulysses : (place + 1) * self.ulysses]
