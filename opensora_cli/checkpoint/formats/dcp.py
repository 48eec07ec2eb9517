"""Folders of `torch.distributed.checkpoint`: tensors in chunks of `torch.save`'s format, in one file per rank.

`.metadata` lists the place of each chunk. It is a pickle, and is read without running code. It is written last: a
folder without it is not complete.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opensora_cli.checkpoint.contents import Checkpoint, Format
from opensora_cli.checkpoint.formats.pickles import DTYPES, broken_file, check_pickle, refusal_of_name
from opensora_cli.checkpoint.formats.torch import open_tensor, save_whole
from opensora_cli.checkpoint.lazy import MAX_DIMENSIONS, Extent, LazyTensor
from opensora_cli.checkpoint.readable import reading
from opensora_cli.checkpoint.shards import refuse_outside
from opensora_cli.checkpoint.state_dicts import find_weights
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.strict_json import shown
from opensora_cli.core.weight_choices import Selection

METADATA_FILE = ".metadata"
"""File that identifies a folder of this format, and makes it complete."""

DATA_SUFFIX = ".distcp"
"""Suffix of the files with the chunks."""

_LISTED = 20
_DATA_FILE = f"__0_0{DATA_SUFFIX}"
_VERSION = "1.0.0"
_MAX_METADATA_BYTES = 2**29
_MAX_OPERATIONS = 32_000_000
"""Limit of the operations of the pickle: enough for 5,000 tensors that are sharded over 100 ranks."""

_RECORDS = frozenset(
    {
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata"),
                *("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
            )
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
    }
)
_UNUSED = frozenset(
    {
        *("torch.device", "torch.serialization._get_layout", "collections.Counter", "_codecs.encode"),
        *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("bytearray", "complex", "set")),
        *(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")
            for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        ),
    }
)
"""Names that `.metadata` may import although no tensor needs them. They are replaced by None."""


class _Record:
    """Stand-in for an object; it keeps only the object's state."""

    state: Any = None

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler whose imports are only inert stand-ins, made for one pickle."""

    def find_class(self, module: str, name: str) -> Any:
        imported = f"{module}.{name}"
        if imported in DTYPES:
            return DTYPES[imported]
        if imported in _RECORDS:
            return _Record
        if imported == "torch.Size":
            return lambda sizes: tuple(sizes)
        if imported == "collections.OrderedDict":
            return lambda: {}
        if imported == "builtins.getattr":  # Python before 3.11.4 pickles enum members with it
            return lambda *_: _Record()
        if imported in _UNUSED:
            return lambda *_: None
        raise _ImportRefusedError(imported)


class _ImportRefusedError(Exception):
    """Error of a pickle that imports a name that is not allowed."""


class _Tensor(NamedTuple):
    """Tensor in `.metadata`; its chunks are offsets and shapes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


_Places = dict[tuple[str, tuple[int, ...]], Extent]
"""Places of the chunks, by the name of the tensor and the offsets in the tensor."""


def open_dcp(folder: Path, *, select: Selection | None = None) -> Checkpoint:
    """Open a folder of `torch.distributed.checkpoint`. The default selection is the model's weights.

    Raises:
        CheckpointError: the folder is incomplete or broken, or imports something else than weights.
        RequestError: the folder lacks the selected weights.
    """
    path = folder / METADATA_FILE
    metadata = _read_metadata(path)
    try:
        tree = _tree(metadata["state_dict_metadata"], metadata["planner_data"])
        weights = find_weights(tree, _Tensor, path=folder, select=select)
        places = _places(folder, metadata["storage_data"], {tensor.name for tensor in weights.leaves.values()})
        entries = {name: _entry(tensor, places, path) for name, tensor in weights.leaves.items()}
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path} is broken: {shown(str(error))}") from error
    return Checkpoint(
        format=Format.DCP,
        path=folder,
        selection=weights.selection,
        selections=weights.selections,
        entries=entries,
        metadata={},
        files=(path, *sorted({place.path for place in places.values()})),
    )


def write_dcp(folder: Path, entries: Mapping[str, LazyTensor], *, advance: Callable[[int], None] | None = None) -> None:
    """Write the files for `torch.distributed.checkpoint.load` into a folder, piece by piece, under their final names.

    `advance` is called with the bytes written by each step.

    Raises:
        RequestError: a tensor has a dtype that `torch.save` does not write.
        CheckpointError: a tensor cannot be read.
        OSError: the folder cannot be written.
    """
    # These take a second to import, and reading needs none of them.
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    places = {}
    with (folder / _DATA_FILE).open("wb") as file:
        for name, entry in entries.items():
            start = file.tell()
            save_whole(entry.read(), file)
            if advance is not None:
                advance(entry.nbytes)
            index = dcp.MetadataIndex(name, torch.Size([0] * len(entry.shape)))
            places[index] = _StorageInfo(_DATA_FILE, start, file.tell() - start)
    described = dcp.Metadata(
        state_dict_metadata={
            name: dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=entry.dtype),
                torch.Size(entry.shape),
                [dcp.ChunkStorageMetadata(torch.Size([0] * len(entry.shape)), torch.Size(entry.shape))],
            )
            for name, entry in entries.items()
        },
        planner_data={name: (name,) for name in entries},
        storage_data=places,
        storage_meta=dcp.StorageMeta(),
        version=_VERSION,
    )
    (folder / METADATA_FILE).write_bytes(pickle.dumps(described))


def _read_metadata(path: Path) -> dict[str, Any]:
    refuse_outside(path, path.parent)
    with reading(path):
        if not path.is_file():
            raise CheckpointError(f"{path.parent} was not written to its end: it lacks {METADATA_FILE}")
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise CheckpointError(f"{path} is too long for a description of tensors")
        content = path.read_bytes()
    check_pickle(content, path=path, max_operations=_MAX_OPERATIONS)
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except _ImportRefusedError as error:
        raise refusal_of_name(path, str(error)) from None
    except Exception as error:
        # A broken pickle may do anything in any order, so every error is caught.
        raise broken_file(path, error) from None
    if not isinstance(found, _Record) or not isinstance(found.state, dict):
        raise CheckpointError(f"{path} describes something else than tensors")
    return found.state


def _tree(described: dict[str, _Record], nesting: dict[str, tuple[str | int, ...]] | None) -> dict[Any, Any]:
    """Return the tensors in their original nested dictionaries."""
    tree: dict[Any, Any] = {}
    for name, record in described.items():
        state = record.state
        if not isinstance(state, dict):
            continue  # the value is no tensor
        dtype = state["properties"].state[0]
        if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
            raise ValueError("it holds a tensor of unknown dtype")
        chunks = tuple(
            (_as_sizes(chunk.state["offsets"]), _as_sizes(chunk.state["sizes"])) for chunk in state["chunks"]
        )
        keys = (nesting or {}).get(name, (name,))
        if not keys or not isinstance(keys, tuple) or not all(isinstance(key, str | int) for key in keys):
            raise ValueError("it holds a tensor without a name")
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        if not isinstance(node, dict) or keys[-1] in node:
            raise ValueError("it has two tensors of the same name")
        node[keys[-1]] = _Tensor(name, dtype, _as_shape(state["size"], dtype), chunks)
    return tree


def _places(folder: Path, stored: dict[_Record, _Record], wanted: set[str]) -> _Places:
    """Return the places of the chunks of some tensors, after checking that the files exist."""
    places: _Places = {}
    for index, info in stored.items():
        name, offsets = index.state["fqn"], index.state.get("offset")
        if isinstance(name, str) and name in wanted and offsets is not None:
            place = info.state
            if place.get("transform_descriptors"):
                raise ValueError("its files are transformed, such as compressed, which is not supported")
            file_name = place["relative_path"]
            if file_name != Path(file_name).name or not file_name.isprintable():
                raise ValueError(f"it refers to a file outside its folder: {shown(file_name)}")
            start, length = _as_sizes((place["offset"], place["length"]))
            places[name, _as_sizes(offsets)] = Extent(folder / file_name, start, length)
    files = {place.path for place in places.values()}
    missing = sorted(shown(file.name) for file in files if not refuse_outside(file, folder).is_file())
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} of its files: {', '.join(missing[:_LISTED])}")
    sizes = {file: file.stat().st_size for file in files}
    for place in places.values():
        if place.offset + place.length > sizes[place.path]:
            raise CheckpointError(
                f"{place.path} is truncated: {sizes[place.path]} bytes are there", hint="fetch it again"
            )
    return places


def _entry(tensor: _Tensor, places: _Places, path: Path) -> LazyTensor:
    """Return a lazy tensor that reads its chunks."""
    name = shown(tensor.name)
    if not prod(tensor.shape):
        return LazyTensor.of(torch.empty(tensor.shape, dtype=tensor.dtype))
    _check_cover(tensor)
    tiles: list[tuple[tuple[int, ...], LazyTensor]] = []
    for offsets, shape in tensor.chunks:
        if prod(shape):
            place = places.get((tensor.name, offsets))
            if place is None:
                raise ValueError(f"a chunk of {name} is in no file")
            part = open_tensor(place.path, start=place.offset, length=place.length)
            if part.shape != shape or part.dtype != tensor.dtype:
                raise CheckpointError(f"{place.path} holds another tensor than {path.name} describes, for {name}")
            tiles.append((offsets, part))
    if len(tiles) == 1:
        return tiles[0][1]

    def read() -> torch.Tensor:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for offsets, part in tiles:
            place = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
            whole[place] = part.read()
        return whole

    return LazyTensor(tensor.shape, tensor.dtype, read)


def _check_cover(tensor: _Tensor) -> None:
    """Refuse chunks that leave gaps, overlap, or reach beyond their tensor."""
    ends = []
    for offsets, shape in tensor.chunks:
        end = tuple(offset + size for offset, size in zip(offsets, shape, strict=True))
        if len(end) != len(tensor.shape) or any(last > size for last, size in zip(end, tensor.shape, strict=True)):
            raise ValueError(f"a chunk of {shown(tensor.name)} reaches beyond it")
        if prod(shape):
            ends.append((offsets, end))
    ends.sort()
    for number, (start, end) in enumerate(ends):
        for other_start, other_end in ends[number + 1 :]:
            if start and other_start[0] >= end[0]:
                break
            if all(a < d and c < b for a, b, c, d in zip(start, end, other_start, other_end, strict=True)):
                raise ValueError(f"two chunks of {shown(tensor.name)} overlap")
    if sum(prod(shape) for _, shape in tensor.chunks) != prod(tensor.shape):
        raise ValueError(f"chunks of {shown(tensor.name)} are missing")


def _as_shape(value: object, dtype: torch.dtype) -> tuple[int, ...]:
    """Return `value` as a shape. Raises ValueError if torch cannot have this shape."""
    sizes = _as_sizes(value)
    # Zeros count as ones, because torch computes strides from the other sizes even if there is no element.
    if prod(max(1, size) for size in sizes) * dtype.itemsize >= 2**63:
        raise ValueError("it holds a tensor of an impossible shape")
    return sizes


def _as_sizes(value: object) -> tuple[int, ...]:
    """Return `value` as sizes or offsets. Raises ValueError if it is no tuple of them, or has too many dimensions."""
    if not isinstance(value, tuple) or len(value) > MAX_DIMENSIONS:
        raise ValueError("it holds a tensor without a shape")
    if not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise ValueError("it holds a tensor of an impossible shape")
    return value
