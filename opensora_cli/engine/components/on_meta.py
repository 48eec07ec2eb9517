"""Building models without weights: in no time, and without random numbers."""

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
    """Inside the block, new modules are on the meta device, and the first values of their weights are not computed.

    Torch computes them there too, to no effect: it takes longer than everything else that a module is built of.
    """
    with torch.device("meta"), _NoValues():
        yield


class _NoValues(TorchFunctionMode):
    """Leaves out what sets the values of tensors."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, unless it sets values."""
        if getattr(func, "__name__", "") in _SET_VALUES:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))
