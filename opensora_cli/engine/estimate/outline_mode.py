"""Mode that makes outlines: the results of operations, on the requested device."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_cli.engine.estimate.outlines import DEVICE, HOST, HostOutline, outlined

_READ_NUMBER = torch.ops.aten._local_scalar_dense.default
_ONE: dict[torch.dtype, bool | int] = {torch.bool: True, torch.int32: 1, torch.int64: 1}


class OutlineMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook for subclasses is untyped
    """Mode whose operations make outlines on the requested device: the host, or a GPU as the meta device.

    A number read from an outline is 1. Operations on real tensors alone are computed. Operations without a rule here
    are torch's own on the meta device.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would first import it, for a second

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the outlines of an operation's results."""
        options = kwargs or {}
        if func is DEVICE:
            return args[0].device
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A wrapper such as DTensor: its operations on the inner tensors also arrive here.
            return NotImplemented
        if _are_real(args, options):
            # Such as the ranks of a device mesh, whose values torch reads.
            return func(*args, **options)
        if "out" in options or _is_in_place(func):
            return options.get("out", args[0]) if func._schema.returns else None
        if func is _READ_NUMBER:
            return _ONE.get(args[0].dtype, 1.0)
        # The rules read outlines, which refuse operations outside of the mode.
        with torch._C._DisableTorchDispatch():
            on_host = _is_on_host(args, options)
            return _placed(outlined(func, on_host, args, options), on_host)


def _are_real(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether an operation has tensors, all of them with values, and makes no tensor on another device."""
    tensors = list(_tensors(args))
    return bool(tensors) and "device" not in options and not any(map(_is_outline, tensors))


def _is_outline(tensor: Tensor) -> bool:
    return type(tensor) is HostOutline or tensor.is_meta


def _tensors(args: tuple[Any, ...]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from (part for part in arg if isinstance(part, Tensor))


def _is_on_host(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    device = options.get("device")
    if device is not None:
        return bool(device.type == "cpu")
    # A host tensor beside a GPU tensor is a number.
    return not any(tensor.device.type == "meta" for tensor in _tensors(args))


@cache
def _is_in_place(func: Any) -> bool:
    schema = func._schema  # of `__lshift__`, too
    return schema.is_mutable and schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags


def _placed(result: Any, on_host: bool) -> Any:
    if not on_host:
        return result
    if isinstance(result, Tensor):
        if isinstance(result, HostOutline):
            return result
        return Tensor._make_subclass(HostOutline, result, dispatch_device=True, device_for_backend_keys=HOST)
    if isinstance(result, (list, tuple)):
        return type(result)(_placed(part, on_host) for part in result)
    return result
