"""How a whole is divided between ranks."""

import pytest

from opensora_cli.parallel.shares import SequenceLengths, shares, span


@pytest.mark.parametrize(
    ("total", "parts", "sizes"),
    [(7, 3, (3, 2, 2)), (8, 4, (2, 2, 2, 2)), (2, 4, (1, 1, 0, 0))],
)
def test_sizes_are_as_equal_as_can_be(total: int, parts: int, sizes: tuple[int, ...]) -> None:
    assert shares(total, parts) == sizes


def test_spans_cover_the_whole() -> None:
    sizes = shares(11, 4)
    whole = list(range(11))
    assert [whole[span(sizes, rank)] for rank in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


@pytest.mark.parametrize(("ring_rank", "of_ulysses"), [(0, (1, 2, 3)), (1, (4, 5, 6))])
def test_lengths_of_both_groups(ring_rank, of_ulysses):
    lengths = SequenceLengths(ring=2, ulysses=3, ring_rank=ring_rank)
    lengths.of_ranks = (1, 2, 3, 4, 5, 6)
    assert lengths.of_ulysses == of_ulysses
    assert lengths.of_ring == (6, 15)
