"""Folders of `torch.distributed.checkpoint`: tensors in chunks of `torch.save`'s format, in one file per rank.

`.metadata` lists the place of each chunk. It is a pickle, and is read without running code. It is written last: a
folder without it is not complete.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import prod
from operator import add, gt, itemgetter, lt, sub
from pathlib import Path
from typing import Any

import torch

from opensora_cli.checkpoint.files import reading, refuse_outside
from opensora_cli.checkpoint.formats.torch import read_saved_tensor, save
from opensora_cli.checkpoint.lazy import Extent, LazyTensor, are_sizes, is_possible
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import first_few, shown

DCP_METADATA = ".metadata"
"""Name of the file that describes a folder."""
DCP_SUFFIX = ".distcp"
"""End of the names of the files with tensors."""
_DATA_FILE = f"__0_0{DCP_SUFFIX}"
_VERSION = "1.0.0"
_MAX_METADATA_BYTES = 2**27


class _Record:
    """Stand-in for an object; it keeps only the object's state."""

    state: Any = None

    def __init__(self, *_: object) -> None:
        """Ignore the arguments of the object."""

    def __setstate__(self, state: object) -> None:
        self.state = state


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_RECORDS = (
    *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata"),
    *("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_NAMES: Mapping[str, Any] = {
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    **{f"{_METADATA_MODULE}.{name}": _Record for name in _RECORDS},
    **{f"{module}.{name}": _Record for module in ("pathlib", "pathlib._local") for name in _PATHS},
    "torch.distributed.checkpoint.filesystem._StorageInfo": _Record,
    "torch.serialization._get_layout": _Record,
    "torch.Size": torch.Size,
    "collections.OrderedDict": OrderedDict,
    "builtins.getattr": _Record,  # Python before 3.11.4 pickles enum members with it
    "_codecs.encode": _Record,
    "builtins.bytearray": _Record,
}
"""Names that `.metadata` may import, and their values. None of them runs code."""


class _Unpickler(pickle._Unpickler):
    """Unpickler in Python: the one in C allocates memory for any number that a broken file gives."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in _NAMES:
            raise CheckpointError(f"it imports {shown(name)}, which no weights need and which could run any code")
        return _NAMES[name]


_Places = Mapping[tuple[str, tuple[int, ...]], Extent]
"""Places of the chunks, by the name of the tensor and the offsets in the tensor."""


def open_dcp(folder: Path) -> tuple[dict[Any, Any], tuple[Path, ...]]:
    """Return the tensors of a folder of `torch.distributed.checkpoint`, in its nested dictionaries, and its files.

    Raises CheckpointError if the folder is incomplete or broken, or imports something else than weights.
    """
    path = folder / DCP_METADATA
    metadata = _read_metadata(path)
    try:
        places = _places(folder, metadata["storage_data"])
        tree = _tree(metadata["state_dict_metadata"], metadata["planner_data"] or {}, places)
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path} is broken: {shown(str(error))}") from error
    return tree, (path, *sorted({place.path for place in places.values()}))


def write_dcp(
    folder: Path, entries: Mapping[str, LazyTensor], *, advance: Callable[[int], None] = lambda count: None
) -> None:
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

    described: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    places, nesting = {}, {}
    with (folder / _DATA_FILE).open("wb") as file:
        for name, entry in entries.items():
            start, origin, shape = file.tell(), torch.Size([0] * len(entry.shape)), torch.Size(entry.shape)
            save(entry.read(), file)
            advance(entry.nbytes)
            places[dcp.MetadataIndex(name, origin)] = _StorageInfo(_DATA_FILE, start, file.tell() - start)
            described[name] = dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=entry.dtype), shape, [dcp.ChunkStorageMetadata(origin, shape)]
            )
            nesting[name] = (name,)
    metadata = dcp.Metadata(
        state_dict_metadata=described,
        planner_data=nesting,
        storage_data=places,
        storage_meta=dcp.StorageMeta(),
        version=_VERSION,
    )
    (folder / DCP_METADATA).write_bytes(pickle.dumps(metadata))


def _read_metadata(path: Path) -> dict[str, Any]:
    refuse_outside(path, path.parent)
    with reading(path):
        if not path.is_file():
            raise CheckpointError(f"{path.parent} was not written to its end: it lacks {DCP_METADATA}")
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise CheckpointError(f"{path} is too long for a description of tensors")
        content = path.read_bytes()
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error.message}") from None
    except Exception as error:
        # A broken pickle may do anything in any order.
        raise CheckpointError(f"{path} is broken: {shown(str(error))}", hint="fetch it again") from error
    if not isinstance(found, _Record) or not isinstance(found.state, dict):
        raise CheckpointError(f"{path} describes something else than tensors")
    return found.state


def _places(folder: Path, stored: Mapping[_Record, _Record]) -> _Places:
    """Return the places of all chunks, after checking that the files exist and are long enough."""
    places = {}
    for index, info in stored.items():
        if (offsets := index.state.get("offset")) is None:
            continue  # the value is no tensor
        place = info.state
        if place.get("transform_descriptors"):
            raise ValueError("its files are transformed, such as compressed, which is not supported")
        name = place["relative_path"]
        if name != Path(name).name or not name.isprintable():
            raise ValueError(f"it refers to a file outside its folder: {shown(name)}")
        places[index.state["fqn"], _as_sizes(offsets)] = Extent(
            folder / name, *_as_sizes((place["offset"], place["length"]))
        )
    files = {place.path for place in places.values()}
    missing = sorted(file.name for file in files if not refuse_outside(file, folder).is_file())
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} of its files: {first_few(missing)}")
    sizes = {file: file.stat().st_size for file in files}
    for place in places.values():
        if place.offset + place.length > sizes[place.path]:
            raise CheckpointError(
                f"{place.path} is truncated: {sizes[place.path]} bytes are there", hint="fetch it again"
            )
    return places


def _tree(
    described: Mapping[str, _Record], nesting: Mapping[str, tuple[str | int, ...]], places: _Places
) -> dict[Any, Any]:
    """Return the tensors in their original nested dictionaries."""
    tree: dict[Any, Any] = {}
    for name, record in described.items():
        if not isinstance(record.state, dict):
            continue  # the value is no tensor
        keys = nesting.get(name, (name,))
        if not keys or not isinstance(keys, tuple) or not all(isinstance(key, str | int) for key in keys):
            raise ValueError("it holds a tensor without a name")
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        if not isinstance(node, dict) or keys[-1] in node:
            raise ValueError("it has two tensors of the same name")
        node[keys[-1]] = _tensor(name, record.state, places)
    return tree


def _tensor(name: str, described: Mapping[str, Any], places: _Places) -> LazyTensor:
    """Return a lazy tensor that reads its chunks, which must not leave gaps, overlap, or reach beyond it."""
    dtype, shape = described["properties"].state[0], _as_sizes(described["size"])
    if not isinstance(dtype, torch.dtype) or not is_possible(shape, dtype):
        raise ValueError("it holds a tensor of an impossible shape")
    tiles: list[tuple[tuple[int, ...], tuple[int, ...], Extent | None]] = []
    for chunk in described["chunks"]:
        start, sizes = _as_sizes(chunk.state["offsets"]), _as_sizes(chunk.state["sizes"])
        end = tuple(map(add, start, sizes))
        if not len(start) == len(sizes) == len(shape) or any(map(gt, end, shape)):
            raise ValueError(f"a chunk of {shown(name)} reaches beyond it")
        if prod(sizes):
            tiles.append((start, end, places.get((name, start))))
    tiles.sort(key=itemgetter(0))
    for number, (start, end, _) in enumerate(tiles):
        for other_start, other_end, _ in tiles[number + 1 :]:
            if start and other_start[0] >= end[0]:
                break
            if all(map(lt, start, other_end)) and all(map(lt, other_start, end)):
                raise ValueError(f"two chunks of {shown(name)} overlap")
    if sum(prod(map(sub, end, start)) for start, end, _ in tiles) != prod(shape):
        raise ValueError(f"chunks of {shown(name)} are missing")
    found = [(start, end, place) for start, end, place in tiles if place is not None]
    if len(found) < len(tiles):
        raise ValueError(f"a chunk of {shown(name)} is in no file")

    def read() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for start, end, place in found:
            part = read_saved_tensor(place)
            if part.shape != tuple(map(sub, end, start)) or part.dtype != dtype:
                raise CheckpointError(f"{place.path} holds another tensor for {shown(name)} than its description")
            if len(found) == 1:
                return part
            whole[tuple(map(slice, start, end))] = part
        return whole

    return LazyTensor(shape, dtype, read)


def _as_sizes(value: object) -> tuple[int, ...]:
    """Return `value` as sizes or offsets. Raises ValueError if it is no tuple of them."""
    if not are_sizes(value):
        raise ValueError("it holds a tensor of an impossible shape")
    return tuple(value)
