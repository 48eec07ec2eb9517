"""Folders of `torch.distributed.checkpoint`: tensors in chunks of `torch.save`'s format, in one file per rank.

`.metadata` lists the place of each chunk. It is a pickle, and is read without running code. It is written last: a
folder without it is not complete.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from math import prod
from operator import add
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from opensora_cli.checkpoint.contents import DCP_METADATA, DCP_SUFFIX, Checkpoint
from opensora_cli.checkpoint.formats.pickles import PLAIN_NAMES, Record, StandIns, unpickle
from opensora_cli.checkpoint.formats.torch import load_tensor
from opensora_cli.checkpoint.lazy import Extent, LazyTensor, are_sizes, is_possible
from opensora_cli.checkpoint.readable import reading, refuse_outside
from opensora_cli.checkpoint.state_dicts import find_weights
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.strict_json import shown
from opensora_cli.core.weight_choices import Format, Selection

_LISTED = 20
_DATA_FILE = f"__0_0{DCP_SUFFIX}"
_VERSION = "1.0.0"
_MAX_METADATA_BYTES = 2**29
_MAX_OPERATIONS = 32_000_000
"""Limit of the operations of the pickle: enough for 5,000 tensors that are sharded over 100 ranks."""

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_RECORDS = (
    *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata"),
    *("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


def _make_record(_: object) -> Record:
    return Record()


_NAMES: StandIns = {
    **PLAIN_NAMES,
    **{f"{_METADATA_MODULE}.{name}": _make_record for name in _RECORDS},
    "torch.distributed.checkpoint.filesystem._StorageInfo": _make_record,
    "builtins.getattr": _make_record,  # Python before 3.11.4 pickles enum members with it
    "_codecs.encode": _make_record,
    **{f"{module}.bytearray": _make_record for module in ("builtins", "__builtin__")},
    **{f"{module}.{name}": _make_record for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


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
    path = folder / DCP_METADATA
    metadata = _read_metadata(path)
    try:
        tree = _tree(metadata["state_dict_metadata"], metadata["planner_data"])
        found, selection, selections = find_weights(tree, _Tensor, path=folder, select=select)
        places = _places(folder, metadata["storage_data"], {tensor.name for tensor in found.values()})
        entries = {name: _entry(tensor, places, path) for name, tensor in found.items()}
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path} is broken: {shown(str(error))}") from error
    return Checkpoint(
        format=Format.DCP,
        path=folder,
        selection=selection,
        selections=selections,
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
            _save(entry.read(), file)
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
    (folder / DCP_METADATA).write_bytes(pickle.dumps(described))


def _save(tensor: torch.Tensor, file: BinaryIO) -> None:
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        # On a full disk torch itself reports only an unexpected position in the file.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _read_metadata(path: Path) -> dict[str, Any]:
    refuse_outside(path, path.parent)
    with reading(path):
        if not path.is_file():
            raise CheckpointError(f"{path.parent} was not written to its end: it lacks {DCP_METADATA}")
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise CheckpointError(f"{path} is too long for a description of tensors")
        content = path.read_bytes()
    found = unpickle(io.BytesIO(content), path=path, names=_NAMES, max_operations=_MAX_OPERATIONS)
    if not isinstance(found, Record) or not isinstance(found.state, dict):
        raise CheckpointError(f"{path} describes something else than tensors")
    return found.state


def _tree(described: dict[str, Record], nesting: dict[str, tuple[str | int, ...]] | None) -> dict[Any, Any]:
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
        if not is_possible(state["size"], dtype):
            raise ValueError("it holds a tensor of an impossible shape")
        node[keys[-1]] = _Tensor(name, dtype, _as_sizes(state["size"]), chunks)
    return tree


def _places(folder: Path, stored: dict[Record, Record], wanted: set[str]) -> _Places:
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
    tiles: list[tuple[tuple[int, ...], tuple[int, ...], Extent]] = []
    for offsets, shape in tensor.chunks:
        if prod(shape):
            place = places.get((tensor.name, offsets))
            if place is None:
                raise ValueError(f"a chunk of {name} is in no file")
            tiles.append((offsets, shape, place))

    def read_tile(shape: tuple[int, ...], place: Extent) -> torch.Tensor:
        part = load_tensor(place.read().numpy().data, place.path)
        if part.shape != shape or part.dtype != tensor.dtype:
            raise CheckpointError(f"{place.path} holds another tensor than {path.name} describes, for {name}")
        return part

    def read() -> torch.Tensor:
        if len(tiles) == 1:
            return read_tile(tensor.shape, tiles[0][2])
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for offsets, shape, place in tiles:
            whole[tuple(map(slice, offsets, map(add, offsets, shape)))] = read_tile(shape, place)
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


def _as_sizes(value: object) -> tuple[int, ...]:
    """Return `value` as sizes or offsets. Raises ValueError if it is no tuple of them."""
    if not are_sizes(value):
        raise ValueError("it holds a tensor of an impossible shape")
    return tuple(value)
