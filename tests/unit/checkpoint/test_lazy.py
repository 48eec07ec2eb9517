"""Lazy tensors: reading, computing and writing them."""

import math

import pytest
import torch

from opensora_cli.checkpoint.lazy import Extent, LazyTensor, rounded
from opensora_cli.core.exceptions import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def stored(tensor, path, *, before=b"xyz", after=b"yz"):
    """Write a tensor into a file between other bytes, and return it as it is stored there."""
    content = bytes_of(tensor)
    path.write_bytes(before + content + after)
    return LazyTensor.stored(tensor.shape, tensor.dtype, Extent(path, len(before), len(content)))


def written(lazy, path):
    with path.open("wb", buffering=0) as file:
        lazy.write(file)
    return path.read_bytes()


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_and_held_tensors_are_read_and_written(tmp_path, shape, dtype):
    tensor = torch.randint(0, 2, shape).to(dtype)
    for lazy in (stored(tensor, tmp_path / "a"), LazyTensor.of(tensor)):
        assert (lazy.shape, lazy.dtype, lazy.nbytes) == (shape, dtype, tensor.nbytes)
        assert torch.equal(lazy.read(), tensor)
        assert written(lazy, tmp_path / "b") == bytes_of(tensor)


def test_tensors_that_are_not_contiguous_are_written_row_by_row(tmp_path):
    tensor = torch.arange(6.0).view(2, 3).t()
    assert written(LazyTensor.of(tensor), tmp_path / "a") == bytes_of(tensor.contiguous())


def test_a_file_that_has_become_shorter_is_an_error(tmp_path):
    lazy = stored(torch.zeros(4), tmp_path / "a")
    (tmp_path / "a").write_bytes(b"xyz")
    for act in (lazy.read, lambda: written(lazy, tmp_path / "b")):
        with pytest.raises(CheckpointError, match="a has become shorter while it was read"):
            act()
    (tmp_path / "a").unlink()
    with pytest.raises(CheckpointError, match="a"):
        lazy.read()


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
