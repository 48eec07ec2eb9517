"""Views of longer tensors: the right elements, without reading them again and again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opensora_cli.checkpoint import views
from opensora_cli.checkpoint.stream import HeldEntry
from opensora_cli.checkpoint.views import PaddedEntry, ReorderedEntry, RowsEntry, StridedEntry, span


class CountedEntry(HeldEntry):
    """Counts the elements that are read of it."""

    read_numel = 0

    def elements(self, start, stop):
        self.read_numel += stop - start
        return super().elements(start, stop)


def view_of(tensor):
    """Return a view as an entry, what it is a view of, and what it is."""
    base = torch.as_strided(tensor, (span(tensor.shape, tensor.stride()),), (1,), tensor.storage_offset())
    counted = CountedEntry(base)
    return StridedEntry(tensor.shape, tensor.stride(), counted), counted, tensor


VIEWS = {
    "transposed": lambda: torch.arange(600_000.0).view(600, 1000).t(),
    "a part of it": lambda: torch.arange(600_000.0).view(600, 1000).t()[10:400, 5:500],
    "one row of it": lambda: torch.arange(600_000.0).view(600, 1000).t()[None],
    "columns": lambda: torch.arange(600_000.0).view(600, 1000)[:, 7:900],
    "columns of one row": lambda: torch.arange(600_000.0).view(1, 600, 1000)[:, :, 7:900],
    "permuted": lambda: torch.arange(600_000.0).view(60, 100, 100).permute(2, 0, 1),
    "every second": lambda: torch.arange(600_000.0)[::2],
}


@pytest.mark.parametrize("block", [1000, 2**20])
@pytest.mark.parametrize("name", VIEWS)
def test_pieces_read_the_base_once(name, block, monkeypatch):
    monkeypatch.setattr(views, "STEP_NUMEL", block)
    monkeypatch.setattr(StridedEntry, "kept", [])
    entry, base, tensor = view_of(VIEWS[name]())
    pieces = list(RowsEntry(entry, 0, entry.shape[0]).pieces(40_000))
    assert len(pieces) > 10
    assert torch.equal(torch.cat(pieces), tensor.reshape(-1))
    assert base.read_numel <= base.numel
    assert StridedEntry.kept == []


def test_two_that_are_compared_are_each_read_once():
    (first, base, _), (second, other, _) = view_of(VIEWS["transposed"]()), view_of(VIEWS["permuted"]())
    for piece, same in zip(first.pieces(80_000), second.pieces(80_000), strict=True):
        assert piece.shape == same.shape
    assert (base.read_numel, other.read_numel) == (base.numel, other.numel)


def test_no_more_than_two_are_kept():
    entries = [view_of(VIEWS["transposed"]())[0] for _ in range(5)]
    for entry in entries:
        entry.elements(0, 10)
    assert StridedEntry.kept == entries[-2:]
    assert [entry._whole is None for entry in entries] == [True, True, True, False, False]
    for entry in entries:
        assert entry.elements(entry.numel - 1, entry.numel).tolist() == [599_999.0]
    assert StridedEntry.kept == []


def test_two_that_are_read_in_turn_twice_are_read_twice():
    (first, base), (second, other) = (view_of(VIEWS["transposed"]())[:2] for _ in range(2))
    for _ in range(2):
        for one, two in zip(first.pieces(800_000), second.pieces(800_000), strict=True):
            assert torch.equal(one, two)
    assert (base.read_numel, other.read_numel) == (2 * base.numel, 2 * other.numel)


def test_the_whole_is_read_without_being_kept():
    entry, base, tensor = view_of(VIEWS["transposed"]())
    assert torch.equal(entry.read(), tensor)
    assert base.read_numel == base.numel
    assert StridedEntry.kept == []


@given(data=st.data())
def test_any_range_of_any_view(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    strides = data.draw(st.lists(st.integers(0, 20), min_size=len(sizes), max_size=len(sizes)))
    entry, _, tensor = view_of(torch.arange(300).as_strided(sizes, strides))
    start = data.draw(st.integers(0, entry.numel))
    stop = data.draw(st.integers(start, entry.numel))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "STEP_NUMEL", data.draw(st.integers(1, 30)))
        assert torch.equal(entry.elements(start, stop), tensor.reshape(-1)[start:stop])
    entry._release()


@given(data=st.data())
def test_any_range_of_reordered_rows_is_the_part_of_the_whole(data):
    order = data.draw(st.permutations(range(data.draw(st.integers(1, 8)))))
    groups, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    shape = data.draw(st.sampled_from([(groups * len(order),), (groups * len(order), columns)]))
    base = CountedEntry(torch.arange(torch.Size(shape).numel()).reshape(shape))
    entry = ReorderedEntry(base, order)
    whole = base.read().reshape(groups, len(order), -1)[:, order].reshape(-1)
    start = data.draw(st.integers(0, entry.numel))
    stop = data.draw(st.integers(start, entry.numel))
    assert torch.equal(entry.elements(start, stop), whole[start:stop])
    assert torch.equal(entry.read(), whole.reshape(shape))


def test_only_the_groups_of_a_range_are_read():
    base = CountedEntry(torch.arange(10 * 4 * 3).reshape(40, 3))
    ReorderedEntry(base, [0, 2, 1, 3]).elements(13, 25)
    assert base.read_numel == 2 * 4 * 3


@given(data=st.data())
def test_any_range_of_padded_rows_is_the_part_of_the_whole(data):
    before, rows, after, columns = (data.draw(st.integers(0, 5)) for _ in range(4))
    base = torch.rand(rows, columns)
    entry = PaddedEntry(HeldEntry(base), start=before, rows=before + rows + after)
    whole = torch.cat([torch.zeros(before, columns), base, torch.zeros(after, columns)])
    start = data.draw(st.integers(0, entry.numel))
    stop = data.draw(st.integers(start, entry.numel))
    assert entry.shape == whole.shape
    assert torch.equal(entry.elements(start, stop), whole.reshape(-1)[start:stop])
