"""Views of longer tensors: the right elements, without reading them again and again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opensora_cli.checkpoint.stream import HeldEntry
from opensora_cli.checkpoint.views import RowsEntry, StridedEntry


class CountedEntry(HeldEntry):
    """Counts the elements that are read of it."""

    read_numel = 0

    def elements(self, start, stop):
        self.read_numel += stop - start
        return super().elements(start, stop)


def view_of(tensor):
    """Return a view as an entry, and what it is a view of."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    counted = CountedEntry(torch.as_strided(tensor, (span,), (1,), tensor.storage_offset()))
    return StridedEntry(tensor.shape, tensor.stride(), counted), counted


MATRIX = torch.arange(60_000.0).view(60, 1000)
VIEWS = {
    "transposed": MATRIX.t(),
    "a part of it": MATRIX.t()[10:400, 5:50],
    "columns": MATRIX[:, 7:900],
    "permuted": torch.arange(60_000.0).view(6, 100, 100).permute(2, 0, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_pieces_read_the_base_once(name):
    entry, base = view_of(VIEWS[name])
    pieces = list(RowsEntry(entry, 0, entry.shape[0]).pieces(4_000))
    assert len(pieces) > 10
    assert torch.equal(torch.cat(pieces), VIEWS[name].reshape(-1))
    assert base.read_numel == base.numel
    assert entry._whole is None


def test_two_that_are_compared_are_each_read_once():
    (first, base), (second, other) = view_of(VIEWS["transposed"]), view_of(VIEWS["permuted"])
    for piece, same in zip(first.pieces(8_000), second.pieces(8_000), strict=True):
        assert piece.shape == same.shape
    assert (base.read_numel, other.read_numel) == (base.numel, other.numel)


def test_no_more_than_two_are_kept():
    entries = [view_of(VIEWS["transposed"])[0] for _ in range(5)]
    for entry in entries:
        entry.elements(0, 10)
    assert [entry._whole is None for entry in entries] == [True, True, True, False, False]


@given(data=st.data())
def test_any_range_of_any_view(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    strides = data.draw(st.lists(st.integers(0, 20), min_size=len(sizes), max_size=len(sizes)))
    tensor = torch.arange(300).as_strided(sizes, strides)
    entry, _ = view_of(tensor)
    start = data.draw(st.integers(0, entry.numel))
    stop = data.draw(st.integers(start, entry.numel))
    assert torch.equal(entry.elements(start, stop), tensor.reshape(-1)[start:stop])
