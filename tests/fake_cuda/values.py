"""The values that small tensors of the CPU have beside their sizes: shares, lengths, and what ranks tell each other."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

UNKNOWN: Mapping[torch.dtype, bool | int] = {torch.bool: True, torch.int32: 1, torch.int64: 1}
"""In place of a number that nobody knows, by its dtype; otherwise 1.0."""

_LARGEST = 2**16
_ATTRIBUTE = "rehearsed_value"
_RANDOM = ("rand", "normal", "empty", "bernoulli", "multinomial", "uniform")


def value_of(tensor: Tensor) -> Tensor | None:
    return getattr(tensor, _ATTRIBUTE, None)


def give(fake: Tensor, real: Tensor | None) -> None:
    """Give a fake tensor a value, if it is a small one of the CPU; None: it is not known any more."""
    if real is None or real.numel() > _LARGEST or fake.device.type != "cpu" or real.is_meta:
        if value_of(fake) is not None:
            delattr(fake, _ATTRIBUTE)
    else:
        setattr(fake, _ATTRIBUTE, real.detach())


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation makes of known values; None where they are not known, or it is on the device."""
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    device = kwargs.get("device")
    is_known = all(value_of(tensor) is not None for tensor in tensors)
    if not is_known or func._opname.startswith(_RANDOM) or (device is not None and torch.device(device).type != "cpu"):
        for tensor in tensors[:1] if func._schema.is_mutable else ():
            give(tensor, None)
        return None
    if not tensors and (device is None or _size(args) > _LARGEST):
        return None

    def real(leaf: Any) -> Any:
        return value_of(leaf) if isinstance(leaf, FakeTensor) else leaf

    given = [tree_map(real, part) for part in (args, kwargs)]
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        return func(*given[0], **given[1])


def _size(args: tuple[Any, ...]) -> int:
    """Return how many elements a tensor made of numbers may have."""
    sizes = [leaf for leaf in tree_leaves(args) if isinstance(leaf, int | float)]
    product = 1
    for size in sizes:
        product *= max(1, int(abs(size)))
    return product
