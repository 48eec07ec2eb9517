"""Safetensors files, read strictly and written as a stream.

The format (https://huggingface.co/docs/safetensors): eight bytes with the length of the header, the header as JSON,
and then the tensors, back to back.
"""

import json
import struct
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from opensora_cli.checkpoint.files import reading_file
from opensora_cli.checkpoint.lazy import Extent, LazyTensor, is_possible, write_all
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import as_unicode, is_unicode, plain, shown

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_FETCH_AGAIN = "fetch it again"


def open_safetensors(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Read the header of a safetensors file, and return its tensors, in the order of their bytes, and its metadata.

    Raises CheckpointError if the file is missing, truncated or longer than its header states, or its header is invalid.
    """
    try:
        with reading_file(path), safe_open(path, "numpy") as file, path.open("rb") as raw:
            start = _LENGTH.size + int.from_bytes(raw.read(_LENGTH.size), "little")
            metadata = dict(sorted((file.metadata() or {}).items()))  # the library's order is random
            names = file.offset_keys()
            described = {name: (file.get_slice(name).get_shape(), file.get_slice(name).get_dtype()) for name in names}
    except SafetensorError as error:
        reason = plain(" ".join(str(error).split()))
        is_cut = "incomplete" in reason or "invalid header length" in reason
        problem = "truncated, or longer than its header states" if is_cut else f"no sound safetensors file: {reason}"
        raise CheckpointError(f"{path} is {problem}", hint=_FETCH_AGAIN) from None
    entries = {}
    for name, (shape, dtype_name) in described.items():
        dtype = _DTYPES.get(dtype_name)
        if dtype is None or not is_possible(shape, dtype):
            raise CheckpointError(f"{path}: tensor {shown(name)} is {dtype_name} {shape}, which torch cannot have")
        length = prod(shape) * dtype.itemsize
        entries[name] = LazyTensor.stored(shape, dtype, Extent(path, start, length))
        start += length
    return entries, metadata


def write_safetensors(
    path: Path,
    entries: Mapping[str, LazyTensor],
    *,
    metadata: Mapping[str, str],
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Write a safetensors file piece by piece, directly to `path`.

    Tensors with larger elements go first, and otherwise keep their order. So each tensor starts at a multiple of its
    element size, and can be used in a map of the file. `format` is added to the metadata, because some readers refuse
    a file without it. `advance` is called with the bytes of each tensor.

    Raises:
        RequestError: a tensor has a name or a dtype that the format lacks; nothing has been written.
        CheckpointError: a tensor cannot be read.
        OSError: `path` cannot be written.
    """
    placement = place_tensors(entries, metadata=metadata)
    with path.open("wb", buffering=0) as file:
        write_all(file, placement.header)
        for name in placement.positions:
            entries[name].write(file)
            advance(entries[name].nbytes)


class Placement(NamedTuple):
    """Layout of a safetensors file that is not written yet."""

    header: bytes
    """Bytes of the file before the tensors."""
    positions: Mapping[str, int]
    """Position of each tensor's first byte in the file, in the order of the file."""
    size: int
    """Size of the file in bytes."""


def place_tensors(entries: Mapping[str, LazyTensor], *, metadata: Mapping[str, str]) -> Placement:
    """Return the layout of a file of `write_safetensors`, from shapes and dtypes alone, with its RequestError.
    Several processes can then write parts of one file.
    """
    document: dict[str, object] = {
        _METADATA: {as_unicode(key): as_unicode(text) for key, text in {"format": "pt", **metadata}.items()}
    }
    starts, end = dict[str, int](), 0
    for name, entry in sorted(entries.items(), key=lambda named: -named[1].dtype.itemsize):
        dtype = _NAMES.get(entry.dtype)
        if dtype is None:
            held = str(entry.dtype).removeprefix("torch.")
            raise RequestError(
                f"a safetensors file holds no {held}, which {shown(name)} is",
                hint="convert it, or write --format torch",
            )
        if name == _METADATA or not is_unicode(name):
            raise RequestError(f"no tensor of a safetensors file can be called {shown(name)}", hint="rename it")
        starts[name], end = end, end + entry.nbytes
        document[name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [starts[name], end]}
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    header = _LENGTH.pack(len(text)) + text
    return Placement(header, {name: len(header) + start for name, start in starts.items()}, len(header) + end)
