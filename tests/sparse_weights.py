"""Files of weights that are zeros: of any size, and without taking the disk for it."""

from collections.abc import Mapping
from pathlib import Path

import torch

from opensora_cli.checkpoint.formats.safetensors import place_tensors
from opensora_cli.checkpoint.lazy import LazyTensor


def save_sparse(path: Path, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype) -> int:
    """Write a safetensors file of tensors' names and shapes, such as of the meta device, and return its size."""
    entries = {
        name: LazyTensor.of(torch.empty(tensor.shape, dtype=dtype, device="meta")) for name, tensor in tensors.items()
    }
    placement = place_tensors(entries, metadata={})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(placement.header)
        file.truncate(placement.size)
    return placement.size
