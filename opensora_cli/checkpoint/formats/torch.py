"""Files of `torch.save`: opened by `torch.load(weights_only=True)` without their data, and written piece by piece.

torch opens an archive on the meta device. This gives dtypes, shapes, and the offset of each storage in the file. The
bytes are read later, as for any lazy tensor. On the meta device torch 2.10 would read the bytes; it finds the offsets
only for fake tensors. Files before torch 1.6 are no archives; torch reads them whole.

`weights_only` runs no code, but a file can make it take a lot of memory, and its errors have many lines. So a file is
checked first: its records must be stored uncompressed, and its pickle may import only names that weights need.
"""

import io
import json
import pickle
import struct
import zipfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from opensora_cli.checkpoint.contents import Checkpoint, Format
from opensora_cli.checkpoint.formats.pickles import (
    DTYPES,
    FETCH_AGAIN,
    PROTOCOL,
    SAVE_STATE_DICT,
    STORAGE_NAMES,
    WEIGHT_NAMES,
    broken_file,
    check_pickle,
)
from opensora_cli.checkpoint.lazy import MAX_DIMENSIONS, Extent, LazyTensor, bytes_of
from opensora_cli.checkpoint.readable import reading, reading_file
from opensora_cli.checkpoint.state_dicts import find_leaves, find_weights
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.reading import is_lack_of_memory
from opensora_cli.core.strict_json import as_unicode, parse_object, shown
from opensora_cli.core.weight_choices import Selection

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAGIC = b"PK\x03\x04"
"""First bytes of an archive."""
PICKLE_MAGIC = b"\x80"
"""First byte of a pickle, and so of a file of torch before 1.6."""

_PICKLE, _METADATA, _BYTE_ORDER, _CODE = "data.pkl", "metadata.json", "byteorder", "constants.pkl"
_ROOT = "archive"
_OLD_START = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
_OLD_PICKLES = 5
_META_IS_LAZY = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)

_MAX_PICKLE_BYTES = 2**26
_MAX_METADATA_BYTES = 2**23
_MAX_DIRECTORY_BYTES = 2**22
"""Room for the records of about 60,000 tensors. In memory each record takes ten times as much."""
_MAX_OPERATIONS = 2_500_000
"""Limit of the operations of a pickle: a tensor takes about 30, and each may take 80 bytes of memory."""

_ENCRYPTED = 1
_LOCAL_HEADER_BYTES = 30
_ALIGNMENT = 64
_ZIP64_FIELD_BYTES = 20
_PADDING_FIELD = struct.Struct("<2sH")


@dataclass(frozen=True, slots=True)
class _Opened:
    """Object that `torch.save` wrote. Its tensors are on the meta device if they have not been read."""

    path: Path
    tree: Any
    metadata: Mapping[str, str]
    archive: Extent | None = None
    """Bytes of the archive; None for a file before torch 1.6, whose tensors have been read."""
    records: tuple[zipfile.ZipInfo, ...] = ()
    """Records of the archive, in the order of their offsets."""

    def entry(self, name: str, tensor: Tensor) -> LazyTensor:
        """Return a tensor, after checking that the file has its data."""
        tensor = Tensor.detach(tensor)  # a file can replace its methods by attributes
        shape, stride, size = tuple(tensor.shape), tensor.stride(), tensor.element_size()
        if tensor.is_conj() or tensor.is_neg():
            raise CheckpointError(f"{self.path} is refused: tensor {shown(name)} is yet to be conjugated or negated")
        if str(tensor.dtype) not in DTYPES or tensor.layout is not torch.strided:
            raise CheckpointError(f"{self.path} is refused: tensor {shown(name)} is not dense")
        # Zeros count as ones, because torch computes strides from the other sizes even if there is no element.
        numel = prod(max(1, count) for count in shape)
        if len(shape) > MAX_DIMENSIONS or numel * size >= 2**63 or min(stride, default=0) < 0:
            raise CheckpointError(f"{self.path} is broken: tensor {shown(name)} has an impossible shape")
        span = 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))
        if tensor.numel() > span and tensor.nbytes > self.path.stat().st_size:
            raise CheckpointError(
                f"{self.path} is refused: tensor {shown(name)} repeats its data until it is larger than the file"
            )
        if not tensor.numel():
            return LazyTensor.of(torch.empty(shape, dtype=tensor.dtype))
        if self.archive is None:
            return LazyTensor.of(tensor)
        first = int(tensor.storage_offset())
        start, stop = first * size, (first + span) * size
        data = self._data(tensor.untyped_storage())
        if data is None or stop > data.length:
            raise CheckpointError(
                f"{self.path} is broken: tensor {shown(name)} is longer than its data", hint=FETCH_AGAIN
            )
        if tensor.is_contiguous():
            return LazyTensor.stored(shape, tensor.dtype, data.part(start, stop))
        reached = LazyTensor.stored((span,), tensor.dtype, data.part(start, stop))
        return LazyTensor(shape, tensor.dtype, lambda: reached.read().as_strided(shape, stride).contiguous())

    def _data(self, storage: torch.UntypedStorage) -> Extent | None:
        """Return the extent of a storage's bytes; None if the file does not have all of them."""
        start = storage._checkpoint_offset
        if start is None or self.archive is None:
            return None
        number = bisect_right(self.records, start, key=lambda record: record.header_offset) - 1
        there = self.records[number].file_size
        # Torch 2.10 takes the bytes of a fake tensor's storage for elements, so only the used part must exist.
        size = storage.nbytes() if _META_IS_LAZY else there
        whole = number >= 0 and size <= min(there, self.archive.length - start)
        return self.archive.part(start, start + size) if whole else None


def open_torch(path: Path, *, select: Selection | None = None) -> Checkpoint:
    """Open a file of `torch.save`: a state dict, or a dictionary that holds one or several.

    Tensors keep their dtype and shape. Plain values beside the state dicts become metadata; other values are dropped.
    If there are several sets of weights, the default selection is the model's.

    Raises:
        CheckpointError: the file is missing or broken, or cannot be read without trusting it.
        RequestError: the file lacks the selected weights.
    """
    opened = _open(path)
    weights = find_weights(opened.tree, Tensor, path=path, select=select)
    return Checkpoint(
        format=Format.TRAINING if weights.is_training else Format.TORCH,
        path=path,
        selection=weights.selection,
        selections=weights.selections,
        entries={name: opened.entry(name, tensor) for name, tensor in weights.leaves.items()},
        metadata={**weights.metadata, **opened.metadata},
        files=(path,),
    )


def check_torch(path: Path) -> None:
    """Check that a file of `torch.save` is whole: its archive, its pickle, and the data of its tensors.

    Raises:
        CheckpointError: the file is missing or broken, or cannot be read without trusting it.
    """
    opened = _open(path)
    tree = {"its tensor": opened.tree} if isinstance(opened.tree, Tensor) else opened.tree
    for name, tensor in find_leaves(tree, Tensor, path):
        opened.entry(name, tensor)


def load_torch(path: Path, *, max_bytes: int | None = None) -> Any:
    """Return the object in a file of `torch.save`, with tensors on the CPU, after the checks of `check_torch`.

    Raises:
        CheckpointError: the file is missing or broken, cannot be read without trusting it, or has more than
            `max_bytes`.
    """
    with reading_file(path):
        size = path.stat().st_size
    if max_bytes is not None and size > max_bytes:
        raise CheckpointError(
            f"{path} is refused: it has {size:,} bytes, and a state of its kind at most {max_bytes:,}"
        )
    check_torch(path)
    with reading(path), path.open("rb") as file:
        return _load(file, path, device="cpu")


def torch_bytes(state: object, *, name: str) -> bytes:
    """Return the bytes of `torch.save`. Raises CheckpointError if `load_torch` would refuse them in a file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path = Path(name)
    _, content, _ = _read_records(_Window(buffer, Extent(path, 0, len(buffer.getbuffer()))), path)
    check_pickle(content, path=path, max_operations=_MAX_OPERATIONS, names=WEIGHT_NAMES)
    return buffer.getvalue()


def open_tensor(path: Path, *, start: int, length: int) -> LazyTensor:
    """Open the tensor that `torch.save` wrote into a part of a file. Raises CheckpointError for another content."""
    opened = _open_archive(Extent(path, start, length))
    if not isinstance(opened.tree, Tensor):
        raise CheckpointError(f"{path} holds something else than a tensor at byte {start}")
    return opened.entry(f"at byte {start}", opened.tree)


def _open(path: Path) -> _Opened:
    with reading_file(path):
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_OLD_START))
        if start.startswith(PICKLE_MAGIC):
            return _read_old(path, is_ours=start == _OLD_START)
    if not start.startswith(MAGIC):
        raise CheckpointError(f"{path} is nothing that torch.save wrote")
    return _open_archive(Extent(path, 0, size))


def _open_archive(whole: Extent) -> _Opened:
    path = whole.path
    with reading(path), path.open("rb") as file:
        window = _Window(file, whole)
        records, content, metadata = _read_records(window, path)
        check_pickle(content, path=path, max_operations=_MAX_OPERATIONS, names=WEIGHT_NAMES)
        with nullcontext() if _META_IS_LAZY else _fake_tensors():
            tree = _load(window, path, device="meta" if _META_IS_LAZY else None)
    return _Opened(path, tree, metadata, whole, records)


def _read_records(window: "_Window", path: Path) -> tuple[tuple[zipfile.ZipInfo, ...], bytes, dict[str, str]]:
    """Return the records of an archive, its pickle, and its metadata, after checking the layout."""
    window.most = _MAX_DIRECTORY_BYTES
    try:
        with zipfile.ZipFile(window) as archive:
            infos = {info.filename: info for info in archive.infolist()}
            root = _check_records(infos, len(archive.infolist()), path)
            if sum(info.file_size for info in infos.values()) > window.length:
                raise CheckpointError(f"{path} is refused: its records are longer than the file")
            window.most = None
            content, order, described = (
                archive.read(root + name) if root + name in infos else b"" for name in (_PICKLE, _BYTE_ORDER, _METADATA)
            )
            metadata = parse_object(described or b"{}")
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        # zipfile documents BadZipFile, but raises struct.error, ValueError and others as well.
        reason = shown(" ".join(str(error).split()))
        raise CheckpointError(f"{path} is truncated or no zip archive: {reason}", hint=FETCH_AGAIN) from error
    if order not in (b"", b"little"):
        raise CheckpointError(f"{path} was written on a big-endian machine, which is not supported")
    ordered = tuple(sorted(infos.values(), key=lambda info: info.header_offset))
    return ordered, content, {key: text for key, text in metadata.items() if isinstance(text, str)}


def _check_records(infos: Mapping[str, zipfile.ZipInfo], count: int, path: Path) -> str:
    """Return the common prefix of an archive's record names. Refuse archives that torch.save never writes."""
    if len(infos) != count:
        raise CheckpointError(f"{path} is refused: it has two records of the same name")
    if any(info.compress_type or info.flag_bits & _ENCRYPTED for info in infos.values()):
        raise CheckpointError(f"{path} is compressed or encrypted, which torch.save never does")
    roots = [name.removesuffix(_PICKLE) for name in infos if name.endswith(f"/{_PICKLE}")]
    if len(roots) != 1:
        raise CheckpointError(f"{path} is a zip archive, but not of torch.save: it has no {_PICKLE}")
    if roots[0] + _CODE in infos:
        raise CheckpointError(f"{path} is refused: a TorchScript archive holds code", hint=SAVE_STATE_DICT)
    for name, most in ((_PICKLE, _MAX_PICKLE_BYTES), (_METADATA, _MAX_METADATA_BYTES), (_BYTE_ORDER, 2**10)):
        info = infos.get(roots[0] + name)
        if info is not None and info.file_size > most:
            raise CheckpointError(f"{path} is refused: its {name} has {info.file_size} bytes")
    return roots[0]


def _read_old(path: Path, *, is_ours: bool) -> _Opened:
    """Read a file of torch before 1.6: pickles one after the other, and then the tensors."""
    if not is_ours:
        raise CheckpointError(f"{path} is a pickle, but not of torch.save")
    with path.open("rb") as file:
        content = file.read(_MAX_PICKLE_BYTES)
        check_pickle(content, path=path, max_operations=_MAX_OPERATIONS, names=WEIGHT_NAMES, count=_OLD_PICKLES)
        return _Opened(path, _load(file, path, device="cpu"), {})


def _fake_tensors() -> AbstractContextManager[object]:
    from torch._subclasses.fake_tensor import FakeTensorMode  # a slow import, only for torch 2.10

    return FakeTensorMode()


def _load(file: "BinaryIO | _Window", path: Path, *, device: str | None) -> Any:
    file.seek(0)
    try:
        return torch.load(file, map_location=device, weights_only=True)  # type: ignore[arg-type]  # what it needs
    except OSError:
        raise
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        raise broken_file(path, error) from error


class _Window(io.RawIOBase):
    """Part of a file, as a file object."""

    def __init__(self, file: BinaryIO, extent: Extent) -> None:
        self._file = file
        self._extent = extent
        self._position = 0
        self.length = extent.length
        self.most: int | None = None
        """Limit of the bytes of one read; None means no limit."""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._extent.length}[whence]
        if origin + offset < 0:
            raise ValueError("a place before the beginning")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer)
        size = min(len(view), max(0, self._extent.length - self._position))
        if self.most is not None and size > self.most:
            raise ValueError(f"a directory of {size} bytes")
        self._file.seek(self._extent.offset + self._position)
        content = self._file.read(size)
        view[: len(content)] = content
        self._position += len(content)
        return len(content)


def write_torch(
    path: Path,
    entries: Mapping[str, LazyTensor],
    *,
    metadata: Mapping[str, str] = MappingProxyType({}),
    advance: Callable[[int], None] | None = None,
) -> None:
    """Write a state dict in the format of `torch.save`, but piece by piece instead of with all tensors in memory.

    `metadata` is stored beside the tensors, for `open_torch`; `torch.load` ignores it. `advance` is called with the
    bytes written by each step.

    Raises:
        RequestError: a tensor has a dtype that `torch.save` does not write; nothing has been written.
        CheckpointError: a tensor cannot be read.
        OSError: `path` cannot be written.
    """
    tree = {name: _describe(entry, str(number)) for number, (name, entry) in enumerate(entries.items())}
    content = io.BytesIO()
    _Pickler(content, protocol=PROTOCOL).dump(tree)
    data = ((f"data/{number}", _content(entry, advance)) for number, entry in enumerate(entries.values()))
    described = json.dumps({as_unicode(key): as_unicode(text) for key, text in metadata.items()})
    _write_archive(
        path,
        chain(
            [(_PICKLE, [content.getvalue()]), (_BYTE_ORDER, [b"little"])],
            data,
            [("version", [b"3\n"])],
            [(_METADATA, [described.encode()])] if metadata else [],
        ),
    )


def _content(entry: LazyTensor, advance: Callable[[int], None] | None) -> Iterator[memoryview]:
    yield bytes_of(entry.read())
    if advance is not None:
        advance(entry.nbytes)


def save_whole(state: object, file: BinaryIO) -> None:
    """Write an object with `torch.save` at the position of a file. Raises OSError if it cannot be written."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # On a full disk torch itself reports only an unexpected position in the file.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype
    numel: int


class _Described(NamedTuple):
    """Description of a tensor that fills its storage."""

    storage: _Storage
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Pickler(pickle.Pickler):
    """Pickler that pickles descriptions of tensors as torch pickles tensors."""

    def persistent_id(self, obj: object) -> object:
        if not isinstance(obj, _Storage):
            return None
        return ("storage", getattr(torch, STORAGE_NAMES[obj.dtype]), obj.key, "cpu", obj.numel)

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, _Described):
            return NotImplemented
        hooks: OrderedDict[str, object] = OrderedDict()
        view = (0, obj.shape, torch.empty(obj.shape, device="meta").stride(), False, hooks)
        if obj.dtype in STORAGE_NAMES:
            return torch._utils._rebuild_tensor_v2, (obj.storage, *view)
        return torch._utils._rebuild_tensor_v3, (obj.storage, *view, obj.dtype)


def _describe(entry: LazyTensor, key: str) -> _Described:
    dtype = entry.dtype
    if str(dtype) not in DTYPES:
        raise RequestError(f"torch.save does not write {str(dtype).removeprefix('torch.')}", hint="convert it")
    storage = _Storage(key, dtype, entry.numel) if dtype in STORAGE_NAMES else _Storage(key, torch.uint8, entry.nbytes)
    return _Described(storage, dtype, entry.shape)


def _write_archive(path: Path, records: Iterable[tuple[str, Iterable[bytes | memoryview]]]) -> None:
    """Write records. Like in torch, their data begins at multiples of 64 bytes, so that it can be mapped."""
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, pieces in records:
            info = zipfile.ZipInfo(f"{_ROOT}/{name}")
            start = file.tell() + _LOCAL_HEADER_BYTES + len(info.filename) + _ZIP64_FIELD_BYTES
            length = -(start + _PADDING_FIELD.size) % _ALIGNMENT
            info.extra = _PADDING_FIELD.pack(b"FB", length) + b"Z" * length
            with archive.open(info, "w", force_zip64=True) as record:
                for piece in pieces:
                    record.write(piece)
