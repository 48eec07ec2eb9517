"""Files of `torch.save`: opened by `torch.load(weights_only=True)`, and written tensor by tensor.

On the meta device torch reads no data of an archive, and tells their place in the file. torch 2.10 would read them, so
it maps the archive instead.

`weights_only` runs no code, but a small file can make it take any amount of time and memory. So a file is checked
first: its records must be stored uncompressed, and its pickle is run by `unpickle`, with stand-ins for all tensors.
Files before torch 1.6 are no archives; torch reads them whole.
"""

import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from opensora_cli.checkpoint.contents import PICKLE_MAGIC, TORCH_MAGIC, Checkpoint
from opensora_cli.checkpoint.formats.pickles import (
    DTYPES,
    FETCH_AGAIN,
    PLAIN_NAMES,
    SAVE_STATE_DICT,
    STORAGE_NAMES,
    WEIGHTS_ONLY_PROTOCOL,
    StandIns,
    UnknownImportError,
    Unused,
    unpickle,
)
from opensora_cli.checkpoint.lazy import Extent, LazyTensor, bytes_of, is_possible
from opensora_cli.checkpoint.readable import reading_file
from opensora_cli.checkpoint.state_dicts import find_scalars, find_weights
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import plain
from opensora_cli.core.reading import is_lack_of_memory
from opensora_cli.core.strict_json import as_unicode, parse_object, shown
from opensora_cli.core.weight_choices import Format, Selection

_PICKLE, _METADATA, _BYTE_ORDER, _CODE = "data.pkl", "metadata.json", "byteorder", "constants.pkl"
_ROOT = "archive"
_OLD_START = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=WEIGHTS_ONLY_PROTOCOL)
_OLD_PICKLES = 5
_TRUSTED = (
    "if you trust who made it, load it with weights_only=False, and torch.save its state_dict() or the dictionary of "
    "its weights, as in torch.save(torch.load(FILE, weights_only=False)['model'], NEW)"
)

_META_HAS_OFFSETS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)

_MAX_PICKLE_BYTES = 2**26
_MAX_METADATA_BYTES = 2**23
_MAX_DIRECTORY_BYTES = 2**22
"""Room for the records of about 60,000 tensors. In memory each record takes ten times as much."""
_MAX_OPERATIONS = 2_500_000
"""Limit of the operations of a pickle: a tensor takes about 30."""

_ENCRYPTED = 1
_LOCAL_HEADER_BYTES = 30
_ALIGNMENT = 64
_ZIP64_FIELD_BYTES = 20
_PADDING_FIELD = struct.Struct("<2sH")


class _Storage(NamedTuple):
    """Storage that a pickle claims to need."""

    dtype: torch.dtype
    key: str
    numel: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


def _make_unused(_: object) -> Unused:
    return Unused()


def _check_view(arguments: Any) -> Unused:
    """Stand in for torch's functions that make a tensor as a view of a storage."""
    storage, offset, shape, stride = arguments[:4]
    dtype = arguments[6] if len(arguments) > 6 and isinstance(arguments[6], torch.dtype) else storage.dtype
    span = 0 if 0 in shape else 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))
    if offset < 0 or (offset + span) * dtype.itemsize > storage.nbytes:
        raise ValueError("a tensor is longer than its data")
    return Unused()


def _rebuild_from_type(arguments: Any) -> Unused:
    function, _, parts = arguments[:3]
    if function not in (_check_view, _make_unused):
        raise ValueError("it makes a tensor from something else than a tensor's parts")
    return Unused() if function is _make_unused else _check_view(parts)


_NAMES: StandIns = {
    **PLAIN_NAMES,
    **{f"torch.{name}": dtype for dtype, name in STORAGE_NAMES.items()},
    **{f"torch._utils._rebuild_{name}": _check_view for name in ("tensor", "tensor_v2", "tensor_v3")},
    **{f"torch._utils._rebuild_{name}": _make_unused for name in ("parameter", "parameter_with_state")},
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.Tensor": Unused(),
    "torch.nn.parameter.Parameter": Unused(),
}


def open_torch(path: Path, *, select: Selection | None = None) -> Checkpoint:
    """Open a file of `torch.save`: a state dict, or a dictionary that holds one or several.

    Tensors keep their dtype and shape. Plain values beside the state dicts become metadata; other values are dropped.
    If there are several sets of weights, the default selection is the model's.

    Raises:
        CheckpointError: the file is missing or broken, or cannot be read without trusting it.
        RequestError: the file lacks the selected weights.
    """
    try:
        tree, metadata = read_object(path, lazily=True)
    except UnknownImportError as error:
        error.hint = _TRUSTED
        raise
    found, selection, selections = find_weights(tree, Tensor, path=path, select=select)
    return Checkpoint(
        format=Format.TORCH,
        path=path,
        selection=selection,
        selections=selections,
        entries={name: _entry(path, name, tensor) for name, tensor in found.items()},
        metadata={**find_scalars(tree), **metadata},
        files=(path,),
    )


def torch_bytes(state: object, *, name: str) -> bytes:
    """Return the bytes of `torch.save`. Raises CheckpointError if `read_object` would refuse them in a file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    _check_archive(buffer, Path(name))
    return buffer.getvalue()


def load_tensor(content: memoryview, path: Path) -> Tensor:
    """Return the tensor in the bytes of `torch.save`, a part of `path`. Raises CheckpointError for other content."""
    file = io.BytesIO(content)
    with _sound_archive(path):
        _check_archive(file, path)
    tensor = _load(file, path)
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{path} holds something else than a tensor")
    return _entry(path, "in it", tensor).read()


def read_object(path: Path, *, lazily: bool) -> tuple[Any, dict[str, str]]:
    """Return the object in a file and the file's metadata, after checking that loading takes bounded resources.

    With `lazily` the tensors of an archive are on the meta device, or mapped by torch 2.10.

    Raises:
        CheckpointError: the file is missing or broken, or cannot be read without trusting it.
    """
    with reading_file(path), path.open("rb") as file:
        start = file.read(len(_OLD_START))
        if start.startswith(PICKLE_MAGIC):
            if start != _OLD_START:
                raise CheckpointError(f"{path} is a pickle, but not of torch.save")
            content = io.BytesIO(start + file.read(_MAX_PICKLE_BYTES))
            claimed = [_check_pickle(content, path) for _ in range(_OLD_PICKLES)]
            if sum(each.nbytes for storages in claimed for each in storages) > file.seek(0, 2):
                raise CheckpointError(f"{path} is truncated: its tensors are longer than the file", hint=FETCH_AGAIN)
            return _load(file, path), {}
        if not start.startswith(TORCH_MAGIC):
            raise CheckpointError(f"{path} is nothing that torch.save wrote")
        with _sound_archive(path):
            metadata = _check_archive(file, path)
        return _load(file, path, lazily=lazily), metadata


def _load(file: BinaryIO, path: Path, *, lazily: bool = False) -> Any:
    file.seek(0)
    try:
        if lazily and not _META_HAS_OFFSETS:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return torch.load(file, map_location="meta" if lazily else "cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        # torch puts several lines of advice around the cause.
        lines = str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path} is broken: {plain(lines[0])}", hint=FETCH_AGAIN) from error


def _entry(path: Path, name: str, tensor: Tensor) -> LazyTensor:
    """Return a loaded tensor that has its data in the file."""
    tensor = Tensor.detach(tensor)  # a file can replace its methods by attributes
    if tensor.is_conj() or tensor.is_neg():
        raise CheckpointError(f"{path} is refused: tensor {shown(name)} is yet to be conjugated or negated")
    if str(tensor.dtype) not in DTYPES or tensor.layout is not torch.strided:
        raise CheckpointError(f"{path} is refused: tensor {shown(name)} is not dense")
    if not is_possible(tuple(tensor.shape), tensor.dtype):
        raise CheckpointError(f"{path} is broken: tensor {shown(name)} has an impossible shape")
    shape, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
    if tensor.nbytes > path.stat().st_size:
        raise CheckpointError(
            f"{path} is refused: tensor {shown(name)} repeats its data until it is larger than the file"
        )
    if not tensor.is_meta:
        return LazyTensor(shape, dtype, tensor.contiguous)
    if not tensor.numel():
        return LazyTensor.of(torch.empty(shape, dtype=dtype))
    span = 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None, "torch.load notes it for the meta device"
    start = offset + int(tensor.storage_offset()) * dtype.itemsize
    extent = Extent(path, start, span * dtype.itemsize)
    if tensor.is_contiguous():
        return LazyTensor.stored(shape, dtype, extent)
    reached = LazyTensor.stored((span,), dtype, extent)
    return LazyTensor(shape, dtype, lambda: reached.read().as_strided(shape, stride).contiguous())


@contextmanager
def _sound_archive(path: Path) -> Iterator[None]:
    """Turn errors of a broken archive into CheckpointErrors."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        # zipfile documents BadZipFile, but raises struct.error, ValueError and others as well.
        reason = shown(" ".join(str(error).split()))
        raise CheckpointError(f"{path} is truncated or no zip archive: {reason}", hint=FETCH_AGAIN) from error


def _check_archive(file: BinaryIO, path: Path) -> dict[str, str]:
    """Refuse an archive that `torch.save` never writes, and return its metadata."""
    with zipfile.ZipFile(_Limited(file)) as directory:
        infos = directory.infolist()
    records = {info.filename: info for info in infos}
    if len(records) != len(infos):
        raise CheckpointError(f"{path} is refused: it has two records of the same name")
    if any(info.compress_type or info.flag_bits & _ENCRYPTED for info in infos):
        raise CheckpointError(f"{path} is compressed or encrypted, which torch.save never does")
    if sum(info.file_size for info in infos) > file.seek(0, io.SEEK_END):
        raise CheckpointError(f"{path} is refused: its records are longer than the file")
    roots = [name.removesuffix(_PICKLE) for name in records if name.endswith(f"/{_PICKLE}")]
    if len(roots) != 1:
        raise CheckpointError(f"{path} is a zip archive, but not of torch.save: it has no {_PICKLE}")
    root = roots[0]
    if root + _CODE in records:
        raise CheckpointError(f"{path} is refused: a TorchScript archive holds code", hint=SAVE_STATE_DICT)
    content = {}
    with zipfile.ZipFile(file) as archive:
        for name, most in ((_PICKLE, _MAX_PICKLE_BYTES), (_METADATA, _MAX_METADATA_BYTES), (_BYTE_ORDER, 2**10)):
            info = records.get(root + name)
            if info is not None and info.file_size > most:
                raise CheckpointError(f"{path} is refused: its {name} has {info.file_size} bytes")
            content[name] = archive.read(info) if info is not None else b""
    if content[_BYTE_ORDER] not in (b"", b"little"):
        raise CheckpointError(f"{path} was written on a big-endian machine, which is not supported")
    for storage in _check_pickle(io.BytesIO(content[_PICKLE]), path):
        record = records.get(f"{root}data/{storage.key}")
        if record is None or storage.nbytes > record.file_size:
            raise CheckpointError(f"{path} is broken: a tensor is longer than its data", hint=FETCH_AGAIN)
    metadata = parse_object(content[_METADATA] or b"{}")
    return {key: text for key, text in metadata.items() if isinstance(text, str)}


def _check_pickle(content: io.BytesIO, path: Path) -> list[_Storage]:
    """Check the next pickle, and return the storages that it needs, each with its largest claim."""
    storages: dict[str, _Storage] = {}

    def add(persistent_id: Any) -> _Storage:
        kind, dtype, key, _, numel, *_ = persistent_id
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(numel) is not int or numel < 0:
            raise ValueError("it has a storage of an unknown kind")
        storage = _Storage(dtype, key, numel)
        storages[key] = max(storage, storages.get(key, storage), key=lambda each: each.nbytes)
        return storage

    unpickle(
        content,
        path=path,
        names=_NAMES,
        max_operations=_MAX_OPERATIONS,
        max_protocol=WEIGHTS_ONLY_PROTOCOL,
        persistent=add,
    )
    return list(storages.values())


class _Limited(io.RawIOBase):
    """File that refuses to read a long directory of records at once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        most = _MAX_DIRECTORY_BYTES + 1
        content = self._file.read(most if size < 0 else min(size, most))
        if len(content) == most:
            raise ValueError(f"its directory has more than {_MAX_DIRECTORY_BYTES:,} bytes")
        return content


def write_torch(
    path: Path,
    entries: Mapping[str, LazyTensor],
    *,
    metadata: Mapping[str, str] = MappingProxyType({}),
    advance: Callable[[int], None] | None = None,
) -> None:
    """Write a state dict in the format of `torch.save`, but tensor by tensor.

    `metadata` is stored beside the tensors, for `open_torch`; `torch.load` ignores it. `advance` is called with the
    bytes written by each step.

    Raises:
        RequestError: a tensor has a dtype that `torch.save` does not write; nothing has been written.
        CheckpointError: a tensor cannot be read.
        OSError: `path` cannot be written.
    """
    for entry in entries.values():
        if str(entry.dtype) not in DTYPES:
            raise RequestError(
                f"torch.save does not write {str(entry.dtype).removeprefix('torch.')}", hint="convert it"
            )
    tree = {name: _Written(str(number), entry) for number, (name, entry) in enumerate(entries.items())}
    content = io.BytesIO()
    _Pickler(content, protocol=WEIGHTS_ONLY_PROTOCOL).dump(tree)
    described = json.dumps({as_unicode(key): as_unicode(text) for key, text in metadata.items()})
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        _write_record(archive, _PICKLE, content.getvalue(), file.tell())
        _write_record(archive, _BYTE_ORDER, b"little", file.tell())
        for each in tree.values():
            _write_record(archive, f"data/{each.key}", bytes_of(each.entry.read()), file.tell())
            if advance is not None:
                advance(each.entry.nbytes)
        _write_record(archive, "version", b"3\n", file.tell())
        if metadata:
            _write_record(archive, _METADATA, described.encode(), file.tell())


def _write_record(archive: zipfile.ZipFile, name: str, content: bytes | memoryview, position: int) -> None:
    """Write a record. Like in torch, its data begins at a multiple of 64 bytes, so that it can be mapped."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}")
    start = position + _LOCAL_HEADER_BYTES + len(info.filename) + _ZIP64_FIELD_BYTES
    length = -(start + _PADDING_FIELD.size) % _ALIGNMENT
    info.extra = _PADDING_FIELD.pack(b"FB", length) + b"Z" * length
    with archive.open(info, "w", force_zip64=True) as record:
        record.write(content)


class _Written(NamedTuple):
    """Tensor that fills the storage `key`."""

    key: str
    entry: LazyTensor


class _Pickler(pickle.Pickler):
    """Pickler that pickles `_Written` as torch pickles tensors."""

    def persistent_id(self, obj: object) -> object:
        if not isinstance(obj, _Storage):
            return None
        return ("storage", getattr(torch, STORAGE_NAMES[obj.dtype]), obj.key, "cpu", obj.numel)

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, _Written):
            return NotImplemented
        shape, dtype = obj.entry.shape, obj.entry.dtype
        stride = torch.empty(shape, device="meta").stride()
        hooks: OrderedDict[str, object] = OrderedDict()
        if dtype in STORAGE_NAMES:
            storage = _Storage(dtype, obj.key, obj.entry.numel)
            return torch._utils._rebuild_tensor_v2, (storage, 0, shape, stride, False, hooks)
        storage = _Storage(torch.uint8, obj.key, obj.entry.nbytes)
        return torch._utils._rebuild_tensor_v3, (storage, 0, shape, stride, False, hooks, dtype)
