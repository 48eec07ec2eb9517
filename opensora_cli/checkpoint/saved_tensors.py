"""How `torch.save` describes tensors in a pickle: as views of storages, whose bytes lie elsewhere."""

import pickle
from collections import OrderedDict
from io import BytesIO
from math import prod
from typing import Any, NamedTuple

import torch

from opensora_cli.checkpoint.stream import MAX_DIMENSIONS, Entry
from opensora_cli.checkpoint.unpickling import Constructor
from opensora_cli.core.exceptions import RequestError

_STORAGE_NAMES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex128: "ComplexDoubleStorage",
    torch.complex64: "ComplexFloatStorage",
}
_UNTYPED_DTYPES = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32),
)
"""What came to torch later, and has no storage class of its own."""


class Storage(NamedTuple):
    """A run of bytes: what it is called, and the elements in it."""

    key: str
    dtype: torch.dtype
    numel: int


class SavedTensor(NamedTuple):
    """A view of a storage: offset and stride count elements of `dtype`."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def load_storage(found: object) -> Storage:
    """Return the storage that a pickle names with a tuple.

    Raises:
        ValueError: the tuple is none of torch's.
    """
    match found:
        # Old files have one more, which is a storage that is a part of another: torch stopped writing those long ago.
        case ("storage", torch.dtype() as dtype, str() as key, str(), int() as numel, *rest) if rest in ([], [None]):
            return Storage(key, dtype, numel)
    raise ValueError("it refers to something else than the data of a tensor")


def save_tensors(tree: object) -> bytes:
    """Return the pickle of any object in which tensors are `SavedTensor`s, as `torch.load` reads it."""
    content = BytesIO()
    _Pickler(content, protocol=2).dump(tree)
    return content.getvalue()


def describe(entry: Entry, key: str) -> SavedTensor:
    """Describe a tensor that is to fill the storage called `key`.

    Raises:
        RequestError: `torch.save` does not write its dtype.
    """
    dtype = entry.dtype
    if dtype not in _STORAGE_NAMES and dtype not in _UNTYPED_DTYPES:
        raise RequestError(f"torch.save does not write {str(dtype).removeprefix('torch.')}", hint="convert it")
    storage = Storage(key, dtype, entry.numel) if dtype in _STORAGE_NAMES else Storage(key, torch.uint8, entry.nbytes)
    return SavedTensor(storage, dtype, 0, entry.shape, torch.empty(entry.shape, device="meta").stride())


def as_shape(value: object, dtype: torch.dtype) -> tuple[int, ...]:
    """Return `value`, which is a shape that torch can have.

    Raises:
        ValueError: it is none.
    """
    sizes = as_sizes(value)
    # With zeros counted as ones: torch computes strides from the other sizes even where there is no element.
    if prod(max(1, size) for size in sizes) * dtype.itemsize >= 2**63:
        raise ValueError("it holds a tensor of an impossible shape")
    return sizes


def as_sizes(value: object) -> tuple[int, ...]:
    """Return `value`, which is a tuple of so many sizes, offsets or strides as a tensor can have.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, tuple) or len(value) > MAX_DIMENSIONS:
        raise ValueError("it holds a tensor without a shape")
    if not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise ValueError("it holds a tensor of an impossible shape")
    return value


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        if not isinstance(obj, Storage):
            return None
        kind = getattr(torch, _STORAGE_NAMES[obj.dtype])
        return ("storage", kind, obj.key, "cpu", obj.numel)

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, SavedTensor):
            return NotImplemented
        hooks: OrderedDict[str, object] = OrderedDict()
        view = (obj.offset, obj.shape, obj.stride, False, hooks)
        if obj.dtype in _STORAGE_NAMES:
            return torch._utils._rebuild_tensor_v2, (obj.storage, *view)
        return torch._utils._rebuild_tensor_v3, (obj.storage, *view, obj.dtype)


def _rebuild(
    storage: object, dtype: object, offset: object, shape: object, stride: object, flags: object = None
) -> SavedTensor:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError("it makes a tensor of something else than data")
    if flags:
        raise ValueError("it holds a tensor that is yet to be conjugated or negated")
    start, sizes, steps = as_sizes((offset,)), as_shape(shape, dtype), as_sizes(stride)
    if len(sizes) != len(steps):
        raise ValueError("it holds a tensor of an impossible shape")
    return SavedTensor(storage, dtype, start[0], sizes, steps)


def _rebuild_v1(storage: Any, offset: object, shape: object, stride: object) -> SavedTensor:
    return _rebuild(storage, storage.dtype, offset, shape, stride)


def _rebuild_v2(
    storage: Any, offset: object, shape: object, stride: object, _grad: object, _hooks: object, flags: object = None
) -> SavedTensor:
    return _rebuild(storage, storage.dtype, offset, shape, stride, flags)


def _rebuild_v3(
    storage: Any,
    offset: object,
    shape: object,
    stride: object,
    _grad: object,
    _hooks: object,
    dtype: object,
    flags: object = None,
) -> SavedTensor:
    return _rebuild(storage, dtype, offset, shape, stride, flags)


def _rebuild_subclass(function: Any, _kind: object, arguments: Any, _state: object) -> object:
    if type(function) is not Constructor:
        raise ValueError("it calls what is no function")
    return function.make(*arguments)


def _first(value: object, *_: object) -> object:
    """Return a parameter's tensor, without whether it had a gradient; or a size's tuple."""
    return value


def _new_dict() -> dict[object, object]:
    return {}


def _ignore(*_: object) -> None:
    """Make nothing of what is no tensor."""


PLAIN_NAMES: dict[str, object] = {
    **{str(dtype): dtype for dtype in (*_STORAGE_NAMES, *_UNTYPED_DTYPES)},
    "torch.Size": Constructor(_first),
    "torch.device": Constructor(_ignore),
    "torch.serialization._get_layout": Constructor(_ignore),
    "collections.OrderedDict": Constructor(_new_dict),
    "collections.Counter": Constructor(_ignore),
    **{f"__builtin__.{name}": Constructor(_ignore) for name in ("bytearray", "complex", "set")},
    **{f"builtins.{name}": Constructor(_ignore) for name in ("bytearray", "complex", "set")},
    "_codecs.encode": Constructor(_ignore),
}
"""What a pickle may ask for that `torch.load(weights_only=True)` lets through: values beside the tensors."""

NAMES: dict[str, object] = {
    **PLAIN_NAMES,
    **{f"torch.{name}": dtype for dtype, name in _STORAGE_NAMES.items()},
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.Tensor": None,
    "torch.nn.parameter.Parameter": Constructor(_first),
    "torch._utils._rebuild_parameter": Constructor(_first),
    "torch._utils._rebuild_parameter_with_state": Constructor(_first),
    "torch._utils._rebuild_tensor": Constructor(_rebuild_v1),
    "torch._utils._rebuild_tensor_v2": Constructor(_rebuild_v2),
    "torch._utils._rebuild_tensor_v3": Constructor(_rebuild_v3),
    "torch._tensor._rebuild_from_type_v2": Constructor(_rebuild_subclass),
}
"""What a pickle with tensors may ask for: those, and what makes dense tensors."""
