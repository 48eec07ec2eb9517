"""What a rank holds of a tensor that is divided between ranks."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a plain one that shares its memory; a plain one is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
