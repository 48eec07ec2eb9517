"""How a whole is divided between ranks: which sizes, and where each share lies."""

from collections.abc import Sequence


def shares(total: int, parts: int) -> tuple[int, ...]:
    """Return `parts` sizes that add up to `total`, as equal as can be, the larger ones first: 7 in 3 is (3, 2, 2).

    Args:
        total: from 0; with fewer than `parts` the last shares are empty.
        parts: from 1.

    Raises:
        ValueError: an argument is out of range.
    """
    if total < 0 or parts < 1:
        raise ValueError(f"{total} cannot be divided into {parts} shares")
    size, rest = divmod(total, parts)
    return (size + 1,) * rest + (size,) * (parts - rest)


def span(sizes: Sequence[int], rank: int) -> slice:
    """Return where the share of `rank` lies in the whole, if the shares follow one another in the order of ranks."""
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])
