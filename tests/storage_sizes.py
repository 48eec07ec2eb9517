"""The bytes behind tensors."""

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of `tensors`, of a DTensor those on this rank; a shared one counts once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storages.values())
