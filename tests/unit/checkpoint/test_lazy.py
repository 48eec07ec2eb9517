"""Lazy tensors: reading, computing and writing them."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from opensora_cli.checkpoint.lazy import Extent, LazyTensor, cast, joined, padded, reordered, rounded, rows, write_all
from opensora_cli.core.exceptions import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool]


def stored(tensor, path, *, before=b"xyz", after=b"yz"):
    """Write a tensor into a file between other bytes, and return it as it is stored there."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    path.write_bytes(before + content + after)
    return LazyTensor.stored(tensor.shape, tensor.dtype, Extent(path, len(before), len(content)))


def written(lazy, path, **options):
    with path.open("wb", buffering=0) as file:
        lazy.write(file, **options)
    return path.read_bytes()


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_and_held_tensors_are_read_and_written(tmp_path, shape, dtype):
    tensor = torch.randint(0, 2, shape).to(dtype)
    for lazy in (stored(tensor, tmp_path / "a"), LazyTensor.of(tensor)):
        assert (lazy.shape, lazy.dtype, lazy.nbytes) == (shape, dtype, tensor.nbytes)
        assert torch.equal(lazy.read(), tensor)
        advanced = []
        content = written(lazy, tmp_path / "b", advance=advanced.append)
        assert (content, sum(advanced)) == (stored_bytes(tensor), tensor.nbytes)


def stored_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_tensors_that_are_not_contiguous_are_written_row_by_row(tmp_path):
    tensor = torch.arange(6.0).view(2, 3).t()
    assert written(LazyTensor.of(tensor), tmp_path / "a") == stored_bytes(tensor.contiguous())


def test_a_tensor_goes_to_the_position_of_the_file(tmp_path):
    with (tmp_path / "a").open("wb", buffering=0) as file:
        write_all(file, b"before")
        LazyTensor.of(torch.tensor([7, 8], dtype=torch.uint8)).write(file)
        write_all(file, b"after")
    assert (tmp_path / "a").read_bytes() == b"before\x07\x08after"


def test_a_file_that_has_become_shorter_is_an_error(tmp_path):
    lazy = stored(torch.zeros(4), tmp_path / "a")
    (tmp_path / "a").write_bytes(b"xyz")
    for act in (lazy.read, lambda: written(lazy, tmp_path / "b")):
        with pytest.raises(CheckpointError, match="a has become shorter while it was read"):
            act()
    (tmp_path / "a").unlink()
    with pytest.raises(CheckpointError, match="a"):
        lazy.read()


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_conversions_equal_those_of_torch(data):
    groups, columns = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    order = data.draw(st.permutations(range(data.draw(st.integers(1, 4)))))
    tensor = torch.arange(groups * len(order) * columns, dtype=torch.float32).view(groups * len(order), columns)
    lazy = LazyTensor.of(tensor)
    start = data.draw(st.integers(0, len(tensor)))
    stop = data.draw(st.integers(start, len(tensor)))
    expected = {
        rows(lazy, start, stop): tensor[start:stop],
        joined([lazy, rows(lazy, start, stop)]): torch.cat([tensor, tensor[start:stop]]),
        reordered(lazy, order): tensor.view(groups, len(order), columns)[:, list(order)].view(tensor.shape),
        padded(lazy, start=2, rows=len(tensor) + 3): torch.nn.functional.pad(tensor, (0, 0, 2, 1)),
        cast(lazy, torch.bfloat16, name="x"): tensor.bfloat16(),
    }
    for found, values in expected.items():
        assert (found.shape, found.dtype) == (tuple(values.shape), values.dtype)
        assert torch.equal(found.read(), values)


def test_rows_of_different_kinds_cannot_be_joined():
    with pytest.raises(ValueError, match="cannot be joined"):
        joined([LazyTensor.of(torch.zeros(1, 2)), LazyTensor.of(torch.zeros(1, 3))])


@pytest.mark.parametrize(
    ("value", "dtype", "hint"),
    [(65520.0, torch.float16, "bf16"), (-1e30, torch.float16, "bf16"), (3.4e38, torch.bfloat16, "fp32")],
)
def test_finite_numbers_never_become_infinite(value, dtype, hint):
    with pytest.raises(CheckpointError, match="x has numbers that are too large") as caught:
        rounded(torch.tensor([0.0, value]), dtype, name="x")
    assert hint in caught.value.hint


def test_infinite_numbers_and_nan_stay():
    values = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(rounded(values, dtype, name="x"), values.to(dtype)) or values.isnan().any()
        assert rounded(values, dtype, name="x").isnan().tolist() == [False, False, True, False]
