"""Reader of pickles that are not trusted. It makes plain containers and stand-ins, and runs nothing.

A pickle is a program for a stack machine. `unpickle` runs the operations that weights need. Imported names are looked
up in a table of stand-ins, each of which takes its arguments as one tuple. So each operation takes bounded time and
memory, and their number is limited.
"""

import io
import pickletools
from collections import Counter
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import Any

import torch

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import plain
from opensora_cli.core.strict_json import shown

WEIGHTS_ONLY_PROTOCOL = 2
"""The highest pickle protocol that `weights_only` reads, and the one that `torch.save` uses."""

FETCH_AGAIN = "fetch it again"
SAVE_STATE_DICT = "save only the weights: torch.save(model.state_dict(), ...)"
"""Hint for files that cannot be read without trusting them."""

_MAX_KEY_LENGTH = 100
_NEWEST_PROTOCOL = 5

STORAGE_NAMES: dict[torch.dtype, str] = {
    dtype: name
    for dtype, name in torch.storage._dtype_to_storage_type_map().items()
    if not name.startswith("Q")  # quantized tensors are more than a storage
}
"""Storage class of each dtype that has one."""

_UNTYPED_DTYPES = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32),
)
"""Newer dtypes of torch, without a storage class of their own."""

DTYPES = {str(dtype): dtype for dtype in (*STORAGE_NAMES, *_UNTYPED_DTYPES)}
"""Dtypes that the tensors of a file may have, by torch's names."""

StandIns = Mapping[str, object]
"""Values of imported names. A callable takes the tuple of its arguments."""


class UnknownImportError(CheckpointError):
    """A pickle imports a name that weights do not need."""


class _Tuple(tuple[Any, ...]):
    """Tuple of a pickle. It is hashed only if it is short and flat: nested tuples could take exponential time."""

    __slots__ = ()

    def __hash__(self) -> int:
        if len(self) > _MAX_KEY_LENGTH or any(isinstance(item, tuple) for item in self):
            raise ValueError("a key nests tuples too deep")
        return super().__hash__()


class Record:
    """Stand-in for an object; it keeps only the object's state."""

    state: Any = None


class Unused:
    """Stand-in for an object that no tensor needs."""


def _copy(kind: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a stand-in for a type that copies one container."""

    def make(arguments: Any) -> Any:
        return kind(*arguments[:1])

    return make


PLAIN_NAMES: StandIns = {
    **DTYPES,
    "collections.OrderedDict": _copy(dict),
    "collections.Counter": _copy(Counter),
    "torch.Size": _copy(_Tuple),
    "torch.device": lambda _: Unused(),
    "torch.serialization._get_layout": lambda _: Unused(),
    **{f"{module}.set": _copy(set) for module in ("builtins", "__builtin__")},
    **{f"{module}.complex": lambda parts: complex(*parts[:2]) for module in ("builtins", "__builtin__")},
}
"""Stand-ins for the names that may be in any pickle of tensors."""


def unpickle(
    file: io.BytesIO,
    *,
    path: Path,
    names: StandIns,
    max_operations: int,
    max_protocol: int = _NEWEST_PROTOCOL,
    persistent: Callable[[Any], object] | None = None,
) -> Any:
    """Return the object of the next pickle in a file.

    Args:
        file: content of the file `path`, which is for messages.
        names: stand-ins for the names that the pickle may import.
        max_operations: limit of the operations; each may take about 100 bytes of memory. Copied items count.
        max_protocol: highest protocol.
        persistent: makes an object from its persistent ID.

    Raises:
        CheckpointError: the pickle is broken, too long or too deep, or imports another name.
    """
    try:
        return _run(file, path, names, max_operations, max_protocol, persistent)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        # A broken pickle may do anything in any order, so every error is caught.
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path} is broken: {plain(lines[0])}", hint=FETCH_AGAIN) from None


def _run(
    file: io.BytesIO,
    path: Path,
    names: StandIns,
    left: int,
    max_protocol: int,
    persistent: Callable[[Any], object] | None,
) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def take(count: int) -> list[Any]:
        if not 0 <= count <= len(stack):
            raise ValueError("it takes more than it has")
        items = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return items

    def marked() -> list[Any]:
        return take(len(stack) - marks.pop())

    def find(name: str) -> Any:
        if name not in names:
            reason = f"it imports {shown(name)}, which no weights need and which could run any code"
            raise UnknownImportError(f"{path} is refused: {reason}")
        return names[name]

    operation: pickletools.OpcodeInfo
    argument: Any
    for operation, argument, _ in pickletools.genops(file):
        left -= 1
        if left < 0:
            raise ValueError("it takes more operations than any weights need")
        match operation.name:
            case "PROTO":
                if argument > max_protocol:
                    raise CheckpointError(
                        f"{path} is a pickle of protocol {argument}, which torch.load(weights_only=True) does not read",
                        hint="save it again without pickle_protocol=",
                    )
            case "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(memo[argument])
            case "NEWTRUE" | "NEWFALSE":
                stack.append(operation.name == "NEWTRUE")
            case "EMPTY_TUPLE":
                stack.append(_Tuple())
            case "TUPLE":
                stack.append(_Tuple(marked()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(_Tuple(take(int(operation.name[-1]))))
            case "EMPTY_LIST":
                stack.append([])
            case "LIST":
                stack.append(marked())
            case "APPEND" | "APPENDS":
                items = take(1) if operation.name == "APPEND" else marked()
                list.extend(stack[-1], items)
            case "EMPTY_DICT":
                stack.append({})
            case "DICT" | "SETITEM" | "SETITEMS":
                items = take(2) if operation.name == "SETITEM" else marked()
                target = {} if operation.name == "DICT" else stack.pop()
                dict.update(target, zip(items[::2], items[1::2], strict=True))
                stack.append(target)
            case "EMPTY_SET":
                stack.append(set())
            case "ADDITEMS":
                items = marked()
                set.update(stack[-1], items)
            case "GLOBAL" | "INST":
                stack.append(find(argument.replace(" ", ".", 1)))
            case "STACK_GLOBAL":
                stack.append(find(".".join(take(2))))
            case "REDUCE" | "NEWOBJ":
                function, arguments = take(2)
                left -= sum(len(each) for each in arguments if isinstance(each, Sized))
                stack.append(function(arguments))
            case "BUILD":
                target, state = take(2)
                if isinstance(target, Record):
                    target.state = state
                elif not isinstance(state, dict):
                    raise ValueError("it takes something else than a dictionary for a state")
                else:
                    left -= len(state)
                stack.append(target)
            case "BINPERSID" if persistent is not None:
                stack.append(persistent(stack.pop()))
            case name if not operation.stack_before and name != "LONG4":
                stack.append(argument)
            case other:
                raise ValueError(f"it has the operation {other}, which no weights need")
    raise ValueError("it has no end")
