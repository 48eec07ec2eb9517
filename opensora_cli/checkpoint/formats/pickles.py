"""Checks of pickles before they are loaded: their imports, and the number of their operations."""

import io
import pickletools
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import plain
from opensora_cli.core.strict_json import shown

SAVE_STATE_DICT = "save only the weights: torch.save(model.state_dict(), ...)"
"""Hint for files that cannot be read without trusting them."""
FETCH_AGAIN = "fetch it again"
_MAX_DEPTH = 1000
"""Limit of the nesting of tuples: hashing very deep ones crashes the process."""
_COPIES_FOR_EACH_OPERATION, _FREE_COPIES = 4, 10_000
"""Limits of visits: an object is visited when it is put into another and, rarely, when a call copies it."""
_MAX_PARTS = 8
_NO_TENSOR = 2**30
_TENSOR_IN_LIST = 2
"""Depth of a tensor in the arguments of a call whose first argument is a list of tensors."""
_ITERATING = frozenset(
    {
        *("collections.OrderedDict", "collections.Counter", "torch.Size"),
        *("builtins.set", "__builtin__.set", "builtins.frozenset", "__builtin__.frozenset"),
    }
)
"""Callables that iterate over their argument."""
_REBUILD, _REBUILD_SUBCLASS = "torch._utils._rebuild_", "torch._tensor._rebuild_from_type_v2"
_CONTAINERS = frozenset({"LIST", "EMPTY_LIST", "DICT", "EMPTY_DICT", "EMPTY_SET", "FROZENSET"})
_MAKING = _CONTAINERS | {"GLOBAL", "EMPTY_TUPLE", "PERSID"}
"""Operations that do more than make a plain object."""

PROTOCOL = 2
"""The highest pickle protocol that `weights_only` reads, and the one that `torch.save` uses."""

STORAGE_NAMES = {
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
"""Newer dtypes of torch, without a storage class of their own."""

DTYPES = {str(dtype): dtype for dtype in (*STORAGE_NAMES, *_UNTYPED_DTYPES)}
"""Dtypes that the tensors of a file may have, by torch's names."""

# Bytes and bytearrays are missing on purpose: in a chain of calls that make them, each call can double the memory.
WEIGHT_NAMES = frozenset(
    {
        *DTYPES,
        *(f"torch.{name}" for name in STORAGE_NAMES.values()),
        *("torch.storage.UntypedStorage", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.Size", "torch.device"),
        *("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"),
        *("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"),
        *("torch._tensor._rebuild_from_type_v2", "torch.serialization._get_layout"),
        *("collections.OrderedDict", "collections.Counter"),
        *("__builtin__.set", "__builtin__.complex", "builtins.set", "builtins.complex"),
    }
)
"""Names that the pickle of a file of weights may import."""


def check_pickle(
    content: bytes, *, path: Path, max_operations: int, names: Collection[str] | None = None, count: int = 1
) -> None:
    """Refuse pickles that are cut off, too long or import too much, without running them.

    Args:
        content: begins with `count` pickles.
        path: the file they are from, for messages.
        max_operations: limit of the operations; each may take about 100 bytes of memory.
        names: names that the pickles may import; None skips this check. With names, the protocol must be one that
            `weights_only` reads.

    Raises:
        CheckpointError: the pickles are refused.
    """
    file = io.BytesIO(content)
    operation: pickletools.OpcodeInfo
    argument: Any
    try:
        objects = _Objects()
        for number, (operation, argument, _) in enumerate(chain(*(pickletools.genops(file) for _ in range(count)))):
            if number == max_operations:
                raise ValueError(f"it takes more than {max_operations} operations")
            if operation.name in ("BINPUT", "LONG_BINPUT", "PUT") and argument > max_operations:
                raise ValueError(f"it remembers object {argument}")
            if names is not None and operation.name == "PROTO" and argument > PROTOCOL:
                raise CheckpointError(
                    f"{path} is a pickle of protocol {argument}, which torch.load(weights_only=True) does not read",
                    hint="save it again without pickle_protocol=",
                )
            if names is not None and operation.name in ("GLOBAL", "INST"):
                imported = argument.replace(" ", ".", 1)
                if imported not in names:
                    raise refusal_of_name(path, imported)
            objects.follow(operation, argument)
            if objects.copied > _COPIES_FOR_EACH_OPERATION * number + _FREE_COPIES:
                raise ValueError("it copies the same objects again and again")
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise broken_file(path, error) from None


class _Object:
    """Summary of an object on the stack of a pickle, derived without making the object."""

    __slots__ = ("depth", "items", "name", "parts", "tensor_depth")

    def __init__(
        self, *, items: int = 0, depth: int = 0, tensor_depth: int = _NO_TENSOR, name: str = "", parts: Any = ()
    ) -> None:
        self.items = items
        """Number of objects that copying or hashing this one visits. For a tuple, objects in nested tuples count."""
        self.depth = depth
        """Depth of nested tuples in the object."""
        self.tensor_depth = tensor_depth
        """Depth of the first tensor or storage in the object; 0 for a tensor. Values of a dictionary are at 2."""
        self.name = name
        """Name of the object, if it was imported."""
        self.parts: Sequence[_Object] = parts
        """The items of a short tuple."""


_PLAIN = _Object()


class _Objects:
    """Objects that a pickle makes, with the properties that determine the time and memory of reading.

    An operation of a few bytes may do much work. A call copies a list, and hashing a key visits all tuples in it. A
    call that iterates over a tensor makes an object of each element, and a file may claim any number of elements.
    """

    def __init__(self) -> None:
        self.copied = 0
        """Number of objects that the operations have visited."""
        self._stack: list[_Object] = []
        self._marks: list[int] = []
        self._memo: dict[int, _Object] = {}
        self._new_tuple: _Object | None = None
        """The tuple that the last operation made."""

    def follow(self, operation: pickletools.OpcodeInfo, argument: Any) -> None:
        """Apply an operation to the objects. Raises ValueError if it does too much, or takes a missing object."""
        name, stack = operation.name, self._stack
        if name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
            return
        new_tuple, self._new_tuple = self._new_tuple, None
        if name == "MARK":
            self._marks.append(len(stack))
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        elif not operation.stack_before and name not in _MAKING:
            stack.extend([_PLAIN] * len(operation.stack_after))
        else:
            taken = operation.stack_before
            count = len(taken)
            if pickletools.markobject in taken:
                count = taken.index(pickletools.markobject) + len(stack) - self._marks.pop()
            if count > len(stack):
                raise ValueError("it takes more than it has")
            items = stack[len(stack) - count :]
            del stack[len(stack) - count :]
            made = self._made(name, argument, items, new_tuple)
            stack.extend([made] * len(operation.stack_after))

    def _made(self, name: str, argument: Any, items: list[_Object], new_tuple: _Object | None) -> _Object:
        """Return the object that an operation makes from its items."""
        if name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"):
            target, *items = items
            self._visit(items)
            if target is not _PLAIN:
                target.items += len(items)
                target.tensor_depth = min(target.tensor_depth, _around(items) + name.startswith("SET"))
            return target
        self._visit(items)
        if name in ("GLOBAL", "INST"):
            return _Object(name=argument.replace(" ", ".", 1), tensor_depth=0 if name == "INST" else _NO_TENSOR)
        if "TUPLE" in name:
            depth = 1 + max((item.depth for item in items), default=0)
            if depth > _MAX_DEPTH:
                raise ValueError("it nests tuples too deep")
            size = len(items) + sum(item.items for item in items)
            parts = tuple(items) if len(items) <= _MAX_PARTS else ()
            self._new_tuple = _Object(items=size, depth=depth, tensor_depth=_around(items), parts=parts)
            return self._new_tuple
        if name in ("REDUCE", "NEWOBJ"):
            called, arguments = items
            return self._called(called, arguments, new_tuple)
        if name == "BUILD":
            target, state = items
            if state.tensor_depth == 0 or (target.tensor_depth > 0 and state.tensor_depth == 1):
                raise ValueError("it takes a tensor for a state")
            if target is not _PLAIN:
                target.items += state.items
            return target
        if name in _CONTAINERS:
            return _Object(items=len(items), tensor_depth=_around(items) + (name == "DICT"))
        return _Object(tensor_depth=0) if name in ("BINPERSID", "PERSID", "OBJ", "NEWOBJ_EX") else _PLAIN

    def _called(self, called: _Object, arguments: _Object, new_tuple: _Object | None) -> _Object:
        """Return the result of a call. The arguments must be a new tuple, so that the number of copies is known."""
        if arguments is not new_tuple:
            raise ValueError("it calls with something else than new arguments")
        if called.name in _ITERATING:
            if arguments.tensor_depth <= _TENSOR_IN_LIST:
                raise ValueError("it makes a collection of the elements of a tensor")
            return _Object(items=arguments.items)
        if called.name == _REBUILD_SUBCLASS:
            function, _, inner, *_ = (*arguments.parts, _PLAIN, _PLAIN, _PLAIN)
            if not function.name.startswith(_REBUILD) or not inner.parts:
                raise ValueError(f"it calls {called.name} with something else than a tensor's parts")
        return _Object(tensor_depth=0)

    def _visit(self, items: Sequence[_Object]) -> None:
        self.copied += sum(item.items for item in items)


def _around(items: Sequence[_Object]) -> int:
    """Return the `tensor_depth` of a container of items."""
    return 1 + min((item.tensor_depth for item in items), default=_NO_TENSOR - 1)


def refusal_of_name(path: Path, imported: str) -> CheckpointError:
    """Return the error for a pickle that imports a name that could run any code."""
    reason = f"it imports {shown(imported)}, which no weights need and which could run any code"
    return CheckpointError(f"{path} is refused: {reason}", hint=SAVE_STATE_DICT)


def broken_file(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file whose pickle cannot be read."""
    # torch puts several lines of advice around the cause.
    lines = str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines() or [type(error).__name__]
    return CheckpointError(f"{path} is broken: {plain(lines[0])}", hint=FETCH_AGAIN)
