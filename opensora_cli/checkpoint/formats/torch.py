"""Files of `torch.save`, read without ever running what they ask for, and without holding what they hold.

Both forms are read: zip archives, and what torch wrote before 1.6: one pickle after the other, and then the tensors.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from torch import uint8

from opensora_cli.checkpoint.archives import MAGIC, PICKLE, Archive, write_archive
from opensora_cli.checkpoint.contents import Checkpoint, Format, Selection
from opensora_cli.checkpoint.saved_tensors import NAMES, SavedTensor, Storage, describe, load_storage, save_tensors
from opensora_cli.checkpoint.state_dicts import find_weights
from opensora_cli.checkpoint.stream import Entry, Extent, StoredEntry
from opensora_cli.checkpoint.strict_json import as_unicode, parse_object, shown
from opensora_cli.checkpoint.unpickling import unpickle
from opensora_cli.checkpoint.views import StridedEntry, is_dense, span
from opensora_cli.core.exceptions import CheckpointError

PICKLE_MAGIC = b"\x80"
"""How a pickle begins, and so a file of torch before 1.6."""

_OLD_NUMBERS = (0x1950A86A20F9469CFC6C, 1001)
"""What those files say first."""

_OLD_COUNT_BYTES = 8
_MAX_PICKLE_BYTES = 2**26
_MAX_METADATA_BYTES = 2**23
_MAX_OPERATIONS = 2_500_000
"""Of a pickle: a tensor in a state dict takes some 30, and each may take 80 bytes of memory."""

_FETCH = "fetch it again"
_METADATA, _BYTE_ORDER = "metadata.json", "byteorder"


@dataclass(frozen=True, slots=True)
class _Saved:
    """What one `torch.save` wrote: any object, with tensors in it whose storages are found by key."""

    tree: Any
    storage: Callable[[str], Extent]
    storages: Mapping[str, Storage]


def open_torch(path: Path, *, select: Selection | None = None) -> Checkpoint:
    """Open a file of `torch.save`: a state dict, or a dictionary that holds one or several.

    Tensors keep their dtype and shape; other values are left out, but for plain ones beside the state dicts, which
    become metadata.

    Args:
        path: the file.
        select: which weights, where there are several; None: those of the model.

    Raises:
        CheckpointError: no such file, a broken one, or one that cannot be read without trusting it.
        RequestError: it has no such weights.
    """
    saved, metadata = _open(path)
    weights = find_weights(saved.tree, SavedTensor, path=path, select=select)
    return Checkpoint(
        format=Format.TRAINING if weights.is_training else Format.TORCH,
        path=path,
        selection=weights.selection,
        selections=weights.selections,
        entries={name: _entry(name, tensor, saved, path) for name, tensor in weights.leaves.items()},
        metadata={**weights.metadata, **metadata},
        files=(path,),
    )


def check_torch(path: Path) -> None:
    """Check that a file of `torch.save`, of whatever it is, is whole: its archive, its pickle, the data of its tensors.

    Raises:
        CheckpointError: no such file, a broken one, or one that cannot be read without trusting it.
    """
    saved, _ = _open(path)
    for key, storage in saved.storages.items():
        if storage.numel and saved.storage(key).length < storage.numel * storage.dtype.itemsize:
            raise CheckpointError(f"{path} is broken: it lacks a part of the data {shown(key)}", hint=_FETCH)


def open_tensor(path: Path, *, start: int, length: int) -> Entry:
    """Open the single tensor that `torch.save` wrote into a part of a file.

    Raises:
        CheckpointError: that part holds something else.
    """
    saved = _read_archive(Archive(path, start=start, length=length), path)
    if not isinstance(saved.tree, SavedTensor):
        raise CheckpointError(f"{path} holds something else than a tensor at byte {start}")
    return _entry(f"at byte {start}", saved.tree, saved, path)


def write_torch(
    path: Path,
    entries: Mapping[str, Entry],
    *,
    metadata: Mapping[str, str] = MappingProxyType({}),
    advance: Callable[[int], None] | None = None,
) -> None:
    """Write a state dict as `torch.save` does, piece by piece, straight to `path`.

    Args:
        path: the file.
        entries: its tensors.
        metadata: kept beside them, where `open_torch` finds it and `torch.load` does not look.
        advance: called with the number of bytes that were written, again and again.

    Raises:
        RequestError: a tensor has a dtype that `torch.save` does not write; nothing has been written.
        CheckpointError: a tensor cannot be read.
        OSError: `path` cannot be written.
    """
    tree = {name: describe(entry, str(number)) for number, (name, entry) in enumerate(entries.items())}
    records = _records(tree, entries.values(), advance)
    if metadata:
        document = json.dumps({as_unicode(key): as_unicode(text) for key, text in metadata.items()})
        records = chain(records, [(_METADATA, [document.encode()])])
    with path.open("wb") as file:
        write_archive(file, records)


def write_tensor(file: BinaryIO, entry: Entry, *, advance: Callable[[int], None] | None = None) -> None:
    """Write a single tensor at the position of a file, as `torch.save` does.

    Raises:
        RequestError, CheckpointError, OSError: as `write_torch`.
    """
    write_archive(file, _records(describe(entry, "0"), [entry], advance))


def _open(path: Path) -> tuple[_Saved, dict[str, str]]:
    """Return what a file holds, and the metadata beside it."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
        if start.startswith(PICKLE_MAGIC):
            return _read_old(path, size), {}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if not start.startswith(MAGIC):
        raise CheckpointError(f"{path} is nothing that torch.save wrote")
    archive = Archive(path, start=0, length=size)
    return _read_archive(archive, path), _read_metadata(archive, path)


def _read_archive(archive: Archive, path: Path) -> _Saved:
    if archive.has(_BYTE_ORDER) and archive.content(_BYTE_ORDER, max_bytes=_MAX_METADATA_BYTES) != b"little":
        raise CheckpointError(f"{path} was written on a big-endian machine, which is not supported")
    content = archive.content(PICKLE, max_bytes=_MAX_PICKLE_BYTES)
    storages: dict[str, Storage] = {}

    def load(found: object) -> Storage:
        storage = load_storage(found)
        storages[storage.key] = storage
        return storage

    tree, _ = unpickle(content, path=path, names=NAMES, max_operations=_MAX_OPERATIONS, persistent_load=load)
    return _Saved(tree, lambda key: archive.record(f"data/{key}"), storages)


def _read_metadata(archive: Archive, path: Path) -> dict[str, str]:
    if not archive.has(_METADATA):
        return {}
    try:
        document = parse_object(archive.content(_METADATA, max_bytes=_MAX_METADATA_BYTES))
    except ValueError as error:
        raise CheckpointError(f"{path} has broken metadata: {error}") from None
    return {key: value for key, value in document.items() if isinstance(value, str)}


def _read_old(path: Path, size: int) -> _Saved:
    storages: dict[str, Storage] = {}

    def remember(found: object) -> Storage:
        storage = load_storage(found)
        return storages.setdefault(storage.key, storage)

    with path.open("rb") as file:
        content = file.read(min(size, _MAX_PICKLE_BYTES))
        position = 0
        parts: list[Any] = []
        for count in range(5):
            part, position = unpickle(
                content,
                path=path,
                names=NAMES,
                max_operations=_MAX_OPERATIONS,
                persistent_load=remember,
                start=position,
            )
            parts.append(part)
            if count < 2 and part != _OLD_NUMBERS[count]:
                raise CheckpointError(f"{path} is a pickle, but not of torch.save")
        *_, system, tree, keys = parts
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise CheckpointError(f"{path} was written on a big-endian machine, which is not supported")
        if not isinstance(keys, list) or not all(isinstance(key, str) and key in storages for key in keys):
            raise CheckpointError(f"{path} is broken: it does not say in which order its data comes")
        extents: dict[str, Extent] = {}
        for key in keys:
            file.seek(position)
            count = int.from_bytes(file.read(_OLD_COUNT_BYTES), "little")
            length = count * storages[key].dtype.itemsize
            extents[key] = Extent(path, position + _OLD_COUNT_BYTES, length)
            position = extents[key].offset + length
            if count != storages[key].numel or position > size:
                raise CheckpointError(f"{path} is truncated or broken: not all of its data is there", hint=_FETCH)
    if extents.keys() != storages.keys():
        raise CheckpointError(f"{path} is broken: it has tensors without data")
    return _Saved(tree, extents.__getitem__, storages)


def _entry(name: str, tensor: SavedTensor, saved: _Saved, path: Path) -> Entry:
    """Return the tensor called `name`, having checked that its file has it."""
    storage, shape, stride, size = tensor.storage, tensor.shape, tensor.stride, tensor.dtype.itemsize
    if not prod(shape):
        return StoredEntry(shape, tensor.dtype, [])
    extent = saved.storage(storage.key)
    numel = span(shape, stride)
    start, stop = tensor.offset * size, (tensor.offset + numel) * size
    if stop > storage.numel * storage.dtype.itemsize or stop > extent.length:
        raise CheckpointError(f"{path} is broken: tensor {shown(name)} is longer than its data")
    if prod(shape) > numel and prod(shape) * size > extent.path.stat().st_size:
        raise CheckpointError(
            f"{path} is refused: tensor {shown(name)} repeats its data until it is larger than the file"
        )
    if is_dense(shape, stride):
        return StoredEntry(shape, tensor.dtype, [extent.part(start, stop)])
    return StridedEntry(shape, stride, StoredEntry((numel,), tensor.dtype, [extent.part(start, stop)]))


def _records(
    tree: object, entries: Iterable[Entry], advance: Callable[[int], None] | None
) -> Iterator[tuple[str, Iterable[bytes | memoryview]]]:
    """Yield the records of an archive, in the order of torch."""
    yield PICKLE, [save_tensors(tree)]
    yield _BYTE_ORDER, [b"little"]
    for number, entry in enumerate(entries):
        yield f"data/{number}", _bytes(entry, advance)
    yield "version", [b"3\n"]


def _bytes(entry: Entry, advance: Callable[[int], None] | None) -> Iterator[memoryview]:
    for piece in entry.pieces():
        yield piece.contiguous().view(uint8).numpy().data
        if advance is not None:
            advance(piece.nbytes)
