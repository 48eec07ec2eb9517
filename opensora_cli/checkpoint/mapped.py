"""Tensors of an open checkpoint by name: parts of mapped files, or on the meta device."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.checkpoint.lazy import Extent, LazyTensor
from opensora_cli.core.exceptions import CheckpointError, HardwareError
from opensora_cli.core.file_states import FileState, FileStates
from opensora_cli.core.reading import is_lack_of_memory


class MappedTensors(Mapping[str, Tensor]):
    """Tensors of an open checkpoint. Each is mapped or read on access, and none is cached."""

    def __init__(self, entries: Mapping[str, LazyTensor]) -> None:
        self._entries = entries
        self._maps: dict[Path, torch.UntypedStorage] = {}
        self._states: tuple[FileState, ...] = ()

    def __getitem__(self, key: str) -> Tensor:
        entry = self._entries[key]
        extent = _mappable(entry)
        if extent is None:
            return entry.read()
        if extent.path not in self._maps:
            self._states += FileStates.of([extent.path]).states
            self._maps[extent.path] = _map(extent.path)
        whole = torch.empty(0, dtype=torch.uint8).set_(self._maps[extent.path])
        if extent.offset + extent.length > whole.numel():
            raise CheckpointError(f"{extent.path} has become shorter while it was read")
        return whole[extent.offset : extent.offset + extent.length].view(entry.dtype).view(entry.shape)

    def has_mapped(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a part of a file that is mapped here."""
        start = tensor.untyped_storage().data_ptr()
        return any(start == storage.data_ptr() for storage in self._maps.values())

    @property
    def files(self) -> FileStates:
        """Mapped files, in their states at the time of mapping."""
        return FileStates(self._states)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class MetaTensors(Mapping[str, Tensor]):
    """Tensors of an open checkpoint on the meta device. A conversion of them reads no weight."""

    def __init__(self, entries: Mapping[str, LazyTensor]) -> None:
        self._entries = entries
        self._last: Tensor | None = None

    def __getitem__(self, key: str) -> Tensor:
        entry = self._entries[key]
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        self._last = None if _mappable(entry) is None else tensor
        return tensor

    def is_view(self, tensor: Tensor) -> bool:
        """Return whether `tensor`, made from the last accessed tensor, is a contiguous part of a mapped file."""
        if self._last is None or not tensor.is_contiguous():
            return False
        return bool(tensor.untyped_storage()._cdata == self._last.untyped_storage()._cdata)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _mappable(entry: LazyTensor) -> Extent | None:
    """Return the bytes of a tensor if it can be used in a mapped file, or None if it has to be read."""
    extent = entry.extent
    # Formats do not promise that data starts at a multiple of its item size, but kernels rely on it.
    return None if extent is None or extent.offset % entry.dtype.itemsize or not extent.length else extent


def _map(path: Path) -> torch.UntypedStorage:
    """Map a file privately. Other maps of the file share its pages until they are written to."""
    try:
        storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
    except (OSError, RuntimeError) as error:
        if is_lack_of_memory(error):
            raise HardwareError(f"there is not enough memory to map {path}") from error
        raise CheckpointError(f"{path} cannot be mapped: {' '.join(str(error).split())}") from error
    assert isinstance(storage, torch.UntypedStorage)
    return storage
