"""Tensors in waiting give the same elements as the tensors they stand for, however they are read."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opensora_cli.checkpoint.stream import Extent, HeldEntry, StoredEntry, cut_extents
from opensora_cli.checkpoint.views import CastEntry, JoinedEntry, RowsEntry
from opensora_cli.core.exceptions import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64]
TAILS = [(), (1,), (3,), (2, 5), (0,)]


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def store(tensor, path, *, gap=3, cut=0):
    """Put a tensor into a file in two extents with a gap between them."""
    content = raw(tensor)
    cut *= tensor.itemsize
    path.write_bytes(b"x" * gap + content[:cut] + b"y" * gap + content[cut:])
    extents = [Extent(path, gap, cut), Extent(path, cut + 2 * gap, len(content) - cut)]
    return StoredEntry(tensor.shape, tensor.dtype, extents)


class Builder:
    """Draws an entry together with the tensor that it must equal."""

    def __init__(self, data, folder):
        self.data = data
        self.folder = folder
        self.files = 0

    def leaf(self, rows, tail, dtype):
        shape = (rows, *tail)
        count = rows * torch.Size(tail).numel()
        values = torch.arange(count).remainder(251).to(dtype).reshape(shape)
        kind = self.data.draw(st.sampled_from(["stored", "held", "transposed"]))
        if kind == "stored":
            self.files += 1
            cut = self.data.draw(st.integers(0, count))
            return store(values, self.folder / f"{self.files}.bin", cut=cut), values
        if kind == "transposed":
            values = values.transpose(0, -1).contiguous().transpose(0, -1)
        return HeldEntry(values), values

    def draw(self, tail, dtype, depth):
        kind = self.data.draw(st.sampled_from(["leaf", "rows", "joined", "cast"])) if depth else "leaf"
        if kind == "rows":
            entry, tensor = self.draw(tail, dtype, depth - 1)
            start = self.data.draw(st.integers(0, len(tensor)))
            stop = self.data.draw(st.integers(start, len(tensor)))
            return RowsEntry(entry, start, stop), tensor[start:stop]
        if kind == "joined":
            parts = [self.draw(tail, dtype, depth - 1) for _ in range(self.data.draw(st.integers(1, 3)))]
            return JoinedEntry([entry for entry, _ in parts]), torch.cat([tensor for _, tensor in parts])
        if kind == "cast":
            entry, tensor = self.draw(tail, self.data.draw(st.sampled_from(DTYPES)), depth - 1)
            return CastEntry(entry, dtype, name="x"), tensor.to(dtype)
        return self.leaf(self.data.draw(st.integers(0, 5)), tail, dtype)


@settings(max_examples=80)
@given(data=st.data())
def test_any_composition_gives_the_elements_of_the_tensor(tmp_path_factory, data):
    builder = Builder(data, tmp_path_factory.mktemp("entries"))
    entry, tensor = builder.draw(
        data.draw(st.sampled_from(TAILS)), data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 3))
    )
    assert (entry.shape, entry.dtype, entry.nbytes) == (tuple(tensor.shape), tensor.dtype, tensor.nbytes)
    assert torch.equal(entry.read(), tensor)
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    assert torch.equal(entry.elements(start, stop), tensor.reshape(-1)[start:stop])
    first = data.draw(st.integers(0, len(tensor)))
    last = data.draw(st.integers(first, len(tensor)))
    assert torch.equal(entry.rows(first, last), tensor[first:last])
    piece_bytes = data.draw(st.integers(1, 64))
    pieces = list(entry.pieces(piece_bytes))
    assert all(piece.nbytes <= max(piece_bytes, piece.itemsize) for piece in pieces)
    assert b"".join(map(raw, pieces)) == raw(tensor)
    if (extents := entry.extents()) is not None:
        stored = [extent.path.read_bytes()[extent.offset :][: extent.length] for extent in extents]
        assert b"".join(stored) == raw(tensor)


def test_rows_and_joins_of_stored_tensors_are_still_copied_as_bytes(tmp_path):
    whole = store(torch.arange(24.0).reshape(6, 4), tmp_path / "a", cut=10)
    joined = JoinedEntry([RowsEntry(whole, 4, 6), RowsEntry(whole, 0, 1)])
    assert [(extent.offset, extent.length) for extent in joined.extents()] == [(70, 32), (3, 16)]
    assert JoinedEntry([whole, CastEntry(whole, torch.float32, name="x")]).extents() is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint64])
def test_rarer_dtypes_are_read_bit_for_bit(tmp_path, dtype):
    tensor = torch.tensor([0, 1, 1, 0] * 6, dtype=torch.uint8).view(dtype).reshape(3, -1)
    entry = store(tensor, tmp_path / "a")
    joined = JoinedEntry([entry, RowsEntry(entry, 1, 2)])
    assert joined.read().dtype == dtype
    assert raw(joined.read()) == raw(tensor) + raw(tensor[1:2])


def test_a_scalar_is_one_row(tmp_path):
    entry = store(torch.tensor(7.0), tmp_path / "a")
    assert entry.read().shape == ()
    assert entry.rows(0, 1).tolist() == [7.0]


def test_pieces_of_a_transposed_tensor_copy_only_their_rows():
    tensor = torch.zeros(64, 1024).t()
    piece = next(HeldEntry(tensor).pieces(4096))
    assert piece.untyped_storage().nbytes() == 4096


def test_extents_are_cut_across_their_borders():
    path = Path("a")
    extents = [Extent(path, 10, 4), Extent(path, 50, 0), Extent(path, 90, 6)]
    assert list(cut_extents(extents, 2, 7)) == [Extent(path, 12, 2), Extent(path, 90, 3)]
    assert list(cut_extents(extents, 4, 4)) == []


def test_parts_that_do_not_fit_together_are_a_mistake(tmp_path):
    with pytest.raises(ValueError, match="joined"):
        JoinedEntry([HeldEntry(torch.zeros(1, 2)), HeldEntry(torch.zeros(1, 3))])
    with pytest.raises(ValueError, match="bytes"):
        StoredEntry((2,), torch.float32, [Extent(tmp_path / "a", 0, 7)])


def test_a_file_that_shrank_or_went_is_a_checkpoint_error(tmp_path):
    entry = store(torch.zeros(100), tmp_path / "a")
    (tmp_path / "a").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="has become shorter"):
        entry.read()
    (tmp_path / "a").unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        entry.read()
