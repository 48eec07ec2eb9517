"""Build models without weights: fast, and without random numbers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SET_VALUES = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_"} | {name for name in vars(nn.init) if name.endswith("_")}
)


@contextmanager
def on_meta() -> Iterator[None]:
    """Create new modules on the meta device inside the block, and skip the initialization of their weights.

    Torch runs the initialization on the meta device too, and this takes longer than the rest of a constructor.
    """
    with torch.device("meta"), _NoValues():
        yield


class _NoValues(TorchFunctionMode):
    """Skips functions that set the values of tensors."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, unless it sets values."""
        if getattr(func, "__name__", "") in _SET_VALUES:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))
