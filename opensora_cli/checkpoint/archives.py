"""The zip archives that `torch.save` writes: records that lie in the file as they are."""

import io
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from opensora_cli.checkpoint.stream import Extent, read_extent
from opensora_cli.checkpoint.strict_json import shown
from opensora_cli.checkpoint.unpickling import SAVE_STATE_DICT
from opensora_cli.core.exceptions import CheckpointError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAGIC = b"PK\x03\x04"
"""How an archive begins, and each record in it."""

PICKLE = "data.pkl"
"""The record that makes an archive one of torch's: it says which tensors there are."""

_CODE = "constants.pkl"
_ROOT = "archive"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 1
_MAX_DIRECTORY_BYTES = 2**22
"""Room for the records of some 60,000 tensors, each of which takes ten times as much memory."""

_ALIGNMENT = 64
_ZIP64_FIELD_BYTES = 20
_PADDING_FIELD = struct.Struct("<2sH")


class Archive:
    """The records of an archive.

    Args:
        path: the file.
        start, length: where the archive is in it.

    Raises:
        CheckpointError: it is broken, or nothing that `torch.save` wrote.
    """

    def __init__(self, path: Path, *, start: int, length: int) -> None:
        self._whole = Extent(path, start, length)
        self._infos = {info.filename: info for info in _read_directory(self._whole)}
        roots = [name.removesuffix(PICKLE) for name in self._infos if name.endswith(f"/{PICKLE}")]
        if len(roots) != 1:
            raise CheckpointError(f"{path} is a zip archive, but not of torch.save: it has no {PICKLE}")
        self._root = roots[0]
        if self.has(_CODE):
            raise CheckpointError(f"{path} is refused: a TorchScript archive holds code", hint=SAVE_STATE_DICT)

    def has(self, name: str) -> bool:
        """Return whether there is such a record."""
        return self._root + name in self._infos

    def record(self, name: str) -> Extent:
        """Return where a record is.

        Raises:
            CheckpointError: there is none, it does not lie in the archive as it is, or it is not in it as a whole.
        """
        path = self._whole.path
        info = self._infos.get(self._root + name)
        if info is None:
            raise CheckpointError(f"{path} lacks its record {shown(name)}", hint="fetch it again")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
            raise CheckpointError(f"{path} is compressed or encrypted, which torch.save never does")
        start = info.header_offset
        if not 0 <= start <= self._whole.length - _LOCAL_HEADER.size:
            raise CheckpointError(f"{path} is broken: record {shown(name)} is outside the file")
        header = bytearray(_LOCAL_HEADER.size)
        read_extent(self._whole.part(start, start + len(header)), memoryview(header))
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start += len(header) + name_bytes + extra_bytes
        if magic != MAGIC or info.file_size != info.compress_size or start + info.file_size > self._whole.length:
            raise CheckpointError(f"{path} is broken: record {shown(name)} is not where it should be")
        return self._whole.part(start, start + info.file_size)

    def content(self, name: str, *, max_bytes: int) -> bytes:
        """Read a record as a whole.

        Raises:
            CheckpointError: as `record`, or it is longer than `max_bytes`.
        """
        extent = self.record(name)
        if extent.length > max_bytes:
            raise CheckpointError(f"{self._whole.path} is refused: its {name} has {extent.length} bytes")
        content = bytearray(extent.length)
        read_extent(extent, memoryview(content))
        return bytes(content)


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, extent: Extent) -> None:
        self._file = file
        self._extent = extent
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._extent.length}[whence]
        if origin + offset < 0:
            raise ValueError("a place before the beginning")
        self._position = origin + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._extent.length - self._position)
        size = left if size is None or size < 0 else min(size, left)
        if size > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {size} bytes")
        self._file.seek(self._extent.offset + self._position)
        content = self._file.read(size)
        self._position += len(content)
        return content


def _read_directory(whole: Extent) -> list[zipfile.ZipInfo]:
    path = whole.path
    try:
        with path.open("rb") as file, zipfile.ZipFile(_Window(file, whole)) as archive:
            infos = archive.infolist()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        # zipfile promises BadZipFile, but struct.error, ValueError, NotImplementedError and others come as well.
        reason = shown(" ".join(str(error).split()))
        raise CheckpointError(f"{path} is truncated or no zip archive: {reason}", hint="fetch it again") from error
    if len({info.filename for info in infos}) != len(infos):
        raise CheckpointError(f"{path} is refused: it has two records of the same name")
    return infos


class _Relative(io.RawIOBase):
    """A file whose positions are counted from where it stood."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._origin = file.tell()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._origin

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(self._origin + offset if whence == io.SEEK_SET else offset, whence) - self._origin

    def write(self, content: "ReadableBuffer") -> int:
        return self._file.write(content)


def write_archive(file: BinaryIO, records: Iterable[tuple[str, Iterable[bytes | memoryview]]]) -> None:
    """Write an archive that torch reads, at the position of a file.

    Data begins at multiples of 64 bytes from the archive's beginning, as torch has it, so that it can be mapped.

    Args:
        file: buffered.
        records: their names, and their bytes in pieces.
    """
    relative = _Relative(file)
    with zipfile.ZipFile(relative, "w") as archive:
        for name, pieces in records:
            info = zipfile.ZipInfo(f"{_ROOT}/{name}")
            info.extra = _padding(relative.tell() + _LOCAL_HEADER.size + len(info.filename) + _ZIP64_FIELD_BYTES)
            with archive.open(info, "w", force_zip64=True) as record:
                for piece in pieces:
                    record.write(piece)


def _padding(position: int) -> bytes:
    """Return a field that moves what follows it, at `position`, to the next multiple of the alignment."""
    length = -(position + _PADDING_FIELD.size) % _ALIGNMENT
    return _PADDING_FIELD.pack(b"FB", length) + b"Z" * length
