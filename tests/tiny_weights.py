"""Small weights with everything in them that a format may get wrong."""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.engine.ckpt.convert import convert
from opensora_cli.settings.tools import ConvertSettings


def awkward_state() -> dict[str, Tensor]:
    """Tensors of many dtypes, of odd sizes, with bits that a conversion of numbers would lose."""
    generator = torch.Generator().manual_seed(11)
    bits = torch.randint(0, 256, (3 * 1024,), dtype=torch.uint8, generator=generator)
    kinds = [
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.complex64),
    ]
    state = {f"bits.{str(kind).removeprefix('torch.')}": bits.view(kind).view(3, -1).clone() for kind in kinds}
    state |= {
        "bool": bits[:7] > 127,
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0),
        "no.rows": torch.empty(0, 3, dtype=torch.bfloat16),
        'a name / with "quotes", blanks and ü': torch.tensor([float("nan"), float("inf"), 1e-45]),
        "five.dimensions": torch.arange(120, dtype=torch.int16).view(1, 2, 3, 4, 5),
    }
    return state


def held(tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    return {name: LazyTensor.of(tensor) for name, tensor in tensors.items()}


def read(entries: Mapping[str, LazyTensor]) -> dict[str, Tensor]:
    return {name: entry.read() for name, entry in entries.items()}


def bit_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether two state dicts have the same names, shapes, dtypes and bits."""
    return first.keys() == second.keys() and all(
        (tensor.shape, tensor.dtype) == (second[name].shape, second[name].dtype)
        and _bits(tensor).equal(_bits(second[name]))
        for name, tensor in first.items()
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def write_holes(
    path: Path,
    tensors: Mapping[str, Tensor | Sequence[int]],
    *,
    dtype: str = "F32",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file of zeros with the shapes of tensors, such as of the meta device, in little disk."""
    header: dict[str, object] = {"__metadata__": dict(metadata or {})}
    end = 0
    for name, tensor in tensors.items():
        shape = tensor.shape if isinstance(tensor, Tensor) else tensor
        start, end = end, end + prod(shape) * {"F32": 4, "BF16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)  # tensors that are not aligned cannot be mapped
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + end)


def converted(source: Path, target: Path, **options: object) -> Path:
    convert(ConvertSettings.model_validate({"source": str(source), "target": str(target), **options}))
    return target
