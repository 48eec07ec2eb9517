"""Tensors of a checkpoint that are read when they are needed, and tensors computed from them.

A `LazyTensor` has a shape and a dtype, and reads all its values at once. Conversions wrap lazy tensors in others. So
only one tensor at a time is in memory, never a whole checkpoint.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from opensora_cli.checkpoint.files import reading
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import plain

_MAX_DIMENSIONS = 64
"""Largest number of dimensions of a tensor that torch can compute with."""

_MAX_BYTES = 2**63


@dataclass(frozen=True, slots=True)
class Extent:
    """Run of bytes of a file."""

    path: Path
    offset: int
    length: int

    def read(self) -> Tensor:
        """Return the bytes as a tensor (length,), uint8. Raises CheckpointError if the file is too short."""
        buffer = torch.empty(self.length, dtype=torch.uint8)
        with reading(self.path), self.path.open("rb") as file:
            file.seek(self.offset)
            if file.readinto(buffer.numpy().data) < self.length:
                raise CheckpointError(f"{self.path} has become shorter while it was read")
        return buffer


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """Tensor that is read when it is needed.

    `read` returns the values on the CPU, in this shape and dtype. It raises CheckpointError if a file cannot be read.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    extent: Extent | None = None
    """Bytes of a file with the values: row by row, little-endian. None for other tensors."""

    @classmethod
    def of(cls, tensor: Tensor) -> "LazyTensor":
        """Wrap a tensor in memory, on any device. Its values are those at the time of reading."""
        held = tensor.detach()
        return cls(tuple(held.shape), held.dtype, held.cpu)

    @classmethod
    def stored(cls, shape: Sequence[int], dtype: torch.dtype, extent: Extent) -> "LazyTensor":
        """Return the tensor whose values are the bytes of `extent`."""
        return cls(tuple(shape), dtype, lambda: extent.read().view(dtype).view(tuple(shape)), extent)

    def map(self, function: Callable[[Tensor], Tensor]) -> "LazyTensor":
        """Return the tensor that `function` makes from this one. It must run on the meta device, too."""
        made = function(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        return LazyTensor(tuple(made.shape), made.dtype, lambda: function(self.read()))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    def write(self, file: FileIO) -> None:
        """Write the bytes at the position of an unbuffered file. Raises CheckpointError, or OSError for `file`."""
        write_all(file, bytes_of(self.read()))


def bytes_of(values: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU: row by row, little-endian."""
    return values.contiguous().view(-1).view(torch.uint8).numpy().data if values.numel() else memoryview(b"")


def write_all(file: FileIO, content: bytes | bytearray | memoryview) -> None:
    """Write all of `content` at the position of an unbuffered file, in as many calls as the system needs."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file.fileno(), rest) :]


def are_sizes(value: object) -> TypeGuard[Sequence[int]]:
    """Return whether a value from a file is a list or tuple of sizes or offsets."""
    return isinstance(value, list | tuple) and all(type(size) is int and 0 <= size < _MAX_BYTES for size in value)


def is_possible(shape: object, dtype: torch.dtype) -> bool:
    """Return whether a value from a file is the shape of a tensor that torch can have."""
    # Zeros count as ones, because torch computes strides from the other sizes even if there is no element.
    return (
        are_sizes(shape)
        and len(shape) <= _MAX_DIMENSIONS
        and prod(max(1, size) for size in shape) * dtype.itemsize < _MAX_BYTES
    )


def rounded(values: Tensor, dtype: torch.dtype, *, name: str) -> Tensor:
    """Return numbers in another dtype. Raises CheckpointError if finite numbers of `name` would become infinite."""
    result = values.to(dtype)
    are_floats = values.dtype.is_floating_point and dtype.is_floating_point
    if not (values.numel() and are_floats and torch.finfo(dtype).max < torch.finfo(values.dtype).max):
        return result
    # The range is a quick first look: counting infinite results takes six times as long, and copies of the tensor.
    low, high = map(float, values.aminmax())
    is_in_range = max(-low, high) <= torch.finfo(dtype).max  # False for NaN
    if not is_in_range and bool((result.isinf() & values.isfinite()).any()):
        raise CheckpointError(
            f"{plain(name)} has numbers that are too large for {str(dtype).removeprefix('torch.')}",
            hint="choose bf16 for it" if dtype is torch.float16 else "choose fp32 for it, or keep its dtype",
        )
    return result
