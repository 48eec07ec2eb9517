import pytest

from opensora_cli.parallel.shares import shares, span


@pytest.mark.parametrize(
    ("total", "parts", "sizes"),
    [(7, 3, (3, 2, 2)), (8, 4, (2, 2, 2, 2)), (2, 4, (1, 1, 0, 0)), (0, 2, (0, 0)), (5, 1, (5,))],
)
def test_sizes_are_as_equal_as_can_be(total: int, parts: int, sizes: tuple[int, ...]) -> None:
    assert shares(total, parts) == sizes


@pytest.mark.parametrize(("total", "parts"), [(-1, 2), (3, 0)])
def test_what_cannot_be_divided_is_refused(total: int, parts: int) -> None:
    with pytest.raises(ValueError, match="cannot be divided"):
        shares(total, parts)


def test_spans_cover_the_whole() -> None:
    sizes = shares(11, 4)
    whole = list(range(11))
    assert [whole[span(sizes, rank)] for rank in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
