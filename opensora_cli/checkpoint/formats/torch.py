"""Files of `torch.save`: mapped by `torch.load(weights_only=True)`, which runs no code, or written tensor by tensor."""

import io
import os
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from opensora_cli.checkpoint.files import reading_file
from opensora_cli.checkpoint.lazy import Extent, LazyTensor, bytes_of, write_all
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import plain, shown
from opensora_cli.core.reading import is_lack_of_memory

_LOCAL_HEADER, _DESCRIPTOR = struct.Struct("<26x2H"), b"PK\x07\x08"
_ENCRYPTED = 1
_FETCH_AGAIN = "fetch it again"
_TRUSTED = (
    "if you trust who made it, load it with weights_only=False, and torch.save its state_dict() or the dictionary of "
    "its weights, as in torch.save(torch.load(FILE, weights_only=False)['model'], NEW)"
)
_IMPORT = re.compile(r"\bGLOBAL ([\w.]+)")


def read_object(path: Path) -> Any:
    """Return the object in a file, whose tensors are mapped.

    Raises CheckpointError if the file is missing or broken, or cannot be read without trusting it.
    """
    with reading_file(path), _sound(path):
        if path.suffix == ".safetensors":  # torch.load goes by this name
            raise CheckpointError(f"{path} is a file of torch.save", hint="give it a name that ends in .pt")
        with path.open("rb") as file:
            _check_archive(file, path)
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def read_saved_tensor(place: Extent) -> Tensor:
    """Return the tensor whose `torch.save` is a part of a file. Raises CheckpointError for other content."""
    path, file = place.path, io.BytesIO(place.read().numpy().data)
    with _sound(path):
        _check_archive(file, path)
        tensor = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{path} holds something else than a tensor")
    return mapped_tensor(path, "", tensor, most=place.length).read()


def mapped_tensor(path: Path, name: str, tensor: Tensor, *, most: int) -> LazyTensor:
    """Return a mapped tensor, after checking that it is dense and has at most `most` bytes."""
    tensor = Tensor.detach(tensor)  # a file can replace its methods by attributes
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise CheckpointError(
            f"{path} is refused: tensor {shown(name)} is not dense, or yet to be conjugated or negated"
        )
    if tensor.is_meta or tensor.nbytes > most:
        raise CheckpointError(f"{path} is refused: tensor {shown(name)} is larger than the file")
    return LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.contiguous)


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    """Turn errors of a broken file into CheckpointErrors, and hide torch's warnings of another pickle protocol."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        # zipfile raises any kind of error, and torch puts several lines of advice around the cause.
        text = " ".join(str(error).split()) or type(error).__name__
        if found := _IMPORT.search(text):
            reason = f"it imports {shown(found[1])}, which no weights need and which could run any code"
            raise CheckpointError(f"{path} is refused: {reason}", hint=_TRUSTED) from error
        reason = text.rpartition("WeightsUnpickler error: ")[2]
        raise CheckpointError(f"{path} is broken: {plain(reason)}", hint=_FETCH_AGAIN) from error


def _check_archive(file: BinaryIO, path: Path) -> None:
    """Refuse an archive that takes more than its size, which `torch.save` never writes."""
    if not zipfile.is_zipfile(file):
        raise CheckpointError(
            f"{path} is truncated, or no file of torch.save since torch 1.6",
            hint="fetch it again, or load it where you trust it, and torch.save its weights",
        )
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        if any(info.compress_type or info.flag_bits & _ENCRYPTED for info in infos):
            raise CheckpointError(f"{path} is compressed or encrypted, which torch.save never does")
        if sum(info.file_size for info in infos) > file.seek(0, io.SEEK_END):
            raise CheckpointError(f"{path} is refused: its records are longer than the file")
    file.seek(0)


def write_torch(
    path: Path, entries: Mapping[str, LazyTensor], *, advance: Callable[[int], None] = lambda count: None
) -> None:
    """Write a state dict in the format of `torch.save`, but tensor by tensor.

    `torch.save` writes the file with room for the data, which is then filled in with its checksums. `advance` is called
    with the bytes written by each step.

    Raises:
        RequestError: a tensor has a dtype that `torch.save` does not write.
        CheckpointError: a tensor cannot be read.
        OSError: `path` cannot be written.
    """
    # It takes a second to import, and reading does not need it.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with path.open("wb") as file, FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        try:
            save({name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}, file)
        except KeyError as error:
            raise RequestError(f"torch.save does not write these tensors: {error}", hint="convert them") from error
    with zipfile.ZipFile(path) as archive:
        headers = {info.filename: info.header_offset for info in archive.infolist()}
    checksums = {}
    with path.open("r+b", buffering=0) as data:
        # `torch.save` numbers the tensors in their order.
        for number, entry in enumerate(entries.values()):
            name, content = f"archive/data/{number}", bytes_of(entry.read())
            checksums[name] = zlib.crc32(content)
            data.seek(headers[name])
            name_and_extra = sum(_LOCAL_HEADER.unpack(data.read(_LOCAL_HEADER.size)))
            data.seek(name_and_extra, os.SEEK_CUR)
            write_all(data, content)
            if data.read(len(_DESCRIPTOR)) == _DESCRIPTOR:  # the checksum follows the data, too
                write_all(data, checksums[name].to_bytes(4, "little"))
            advance(entry.nbytes)
    with zipfile.ZipFile(path, "a") as archive:
        for name, checksum in checksums.items():
            archive.getinfo(name).CRC = checksum
        archive.comment = b""  # makes it write the directory again


def save(value: object, file: BinaryIO) -> None:
    """Write the `torch.save` of an object. Raises OSError if the file cannot be written."""
    try:
        torch.save(value, file)
    except RuntimeError as error:
        # On a full disk torch itself reports only an unexpected position in the file.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
