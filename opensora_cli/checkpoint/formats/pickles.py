"""Pickles are checked before anything reads them: what they import, and how many operations they have."""

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
"""What to do about files that cannot be read without trusting them."""
FETCH_AGAIN = "fetch it again"
_MAX_DEPTH = 1000
"""Of tuples: hashing very deep ones ends the process."""
_COPIES_FOR_EACH_OPERATION, _FREE_COPIES = 4, 10_000
"""An object is visited where it is put into another and, rarely, where a call copies it."""
_MAX_PARTS = 8
_NO_TENSOR = 2**30
_TENSOR_IN_LIST = 2
"""The depth of a tensor in the arguments of a call whose first argument is a list of tensors."""
_ITERATING = frozenset(
    {
        *("collections.OrderedDict", "collections.Counter", "torch.Size"),
        *("builtins.set", "__builtin__.set", "builtins.frozenset", "__builtin__.frozenset"),
    }
)
"""What goes through its argument when it is called."""
_REBUILD, _REBUILD_SUBCLASS = "torch._utils._rebuild_", "torch._tensor._rebuild_from_type_v2"
_CONTAINERS = frozenset({"LIST", "EMPTY_LIST", "DICT", "EMPTY_DICT", "EMPTY_SET", "FROZENSET"})
_MAKING = _CONTAINERS | {"GLOBAL", "EMPTY_TUPLE", "PERSID"}
"""Operations of which more is known than that they make a plain object."""

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
"""What came to torch later, and has no storage class of its own."""

DTYPES = {str(dtype): dtype for dtype in (*STORAGE_NAMES, *_UNTYPED_DTYPES)}
"""What tensors of a file may have, by torch's names."""

# Bytes and bytearrays are missing on purpose: a chain of calls that make them can double the memory each time.
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
"""What the pickle of a file of weights may import."""


def check_pickle(
    content: bytes, *, path: Path, max_operations: int, names: Collection[str] | None = None, count: int = 1
) -> None:
    """Refuse pickles that are cut off, too long or import too much, without running them.

    Args:
        content: begins with `count` pickles.
        path: the file they are from, for messages.
        max_operations: a longer pickle is refused: each operation may take some 100 bytes of memory.
        names: what they may import, if that is to be checked here. Then they must be of a protocol that `weights_only`
            reads.

    Raises:
        CheckpointError: they are refused.
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
    """What is known of an object on the stack of a pickle without making it."""

    __slots__ = ("depth", "items", "name", "parts", "tensor_depth")

    def __init__(
        self, *, items: int = 0, depth: int = 0, tensor_depth: int = _NO_TENSOR, name: str = "", parts: Any = ()
    ) -> None:
        self.items = items
        """How many objects a call that copies or hashes it visits; of a tuple, with those of the tuples in it."""
        self.depth = depth
        """How deep tuples are nested in it."""
        self.tensor_depth = tensor_depth
        """How deep in it the first tensor or storage is; it is one itself at 0. Values of a dictionary are at 2."""
        self.name = name
        """The name, if it was imported."""
        self.parts: Sequence[_Object] = parts
        """The items of a short tuple."""


_PLAIN = _Object()


class _Objects:
    """The objects that a pickle makes, as far as they decide how much time and memory reading takes.

    An operation has a few bytes, and may do much: a call copies a list, a key is hashed with all tuples in it, and a
    call that goes through a tensor makes an object of each element, of which a file may claim any number.
    """

    def __init__(self) -> None:
        self.copied = 0
        """Objects that operations have visited so far."""
        self._stack: list[_Object] = []
        self._marks: list[int] = []
        self._memo: dict[int, _Object] = {}
        self._new_tuple: _Object | None = None
        """The tuple that the last operation made."""

    def follow(self, operation: pickletools.OpcodeInfo, argument: Any) -> None:
        """Do to the objects what an operation does; ValueError: it does too much, or takes what is not there."""
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
        """Return what an operation makes of the items that it takes."""
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
        """Return the result of a call; what it copies is known while nothing can be added to its arguments."""
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
    """Return the `tensor_depth` of what holds some items."""
    return 1 + min((item.tensor_depth for item in items), default=_NO_TENSOR - 1)


def refusal_of_name(path: Path, imported: str) -> CheckpointError:
    """Return the error of a pickle that imports something that only running code could give."""
    reason = f"it imports {shown(imported)}, which no weights need and which could run any code"
    return CheckpointError(f"{path} is refused: {reason}", hint=SAVE_STATE_DICT)


def broken_file(path: Path, error: Exception) -> CheckpointError:
    """Return the error of a file whose pickle cannot be read."""
    # torch puts several lines of advice around what went wrong.
    lines = str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines() or [type(error).__name__]
    return CheckpointError(f"{path} is broken: {plain(lines[0])}", hint=FETCH_AGAIN)
