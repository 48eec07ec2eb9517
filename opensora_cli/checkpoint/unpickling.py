"""Unpickling that can run nothing: enough for what `torch.save` and `torch.distributed.checkpoint` write, and no more.

Like `torch.load(weights_only=True)`, but stricter: what a pickle may call are functions of this package alone, none of
which copies or allocates what the pickle asks for, so that a small file cannot take a lot of memory either.
"""

import io
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_cli.checkpoint.strict_json import shown
from opensora_cli.core.exceptions import CheckpointError

SAVE_STATE_DICT = "save only the weights: torch.save(model.state_dict(), ...)"
"""What to do about files that cannot be read without trusting them."""

_SCALARS = (str, int, float, bool, bytes, type(None))
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
    | {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BYTEARRAY8"}
)
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_LONGEST_TUPLE = 16


class _Refused(ValueError):
    """A pickle asks for something that only running code could give."""


@dataclass(frozen=True, slots=True)
class Constructor:
    """Stands for a class or function that a pickle may call; what it makes is inert."""

    make: Callable[..., object]


@dataclass(slots=True, eq=False)
class Record:
    """Stands for an object of which only the state matters, as its class would store it."""

    state: Any = None


def unpickle(
    content: bytes,
    *,
    path: Path,
    names: Mapping[str, object],
    max_operations: int,
    persistent_load: Callable[[object], object] | None = None,
    start: int = 0,
) -> tuple[Any, int]:
    """Return the object that a pickle describes, and where the pickle ends.

    Args:
        content: holds the pickle.
        path: the file it is from, for messages.
        names: what the pickle may ask for, by its full name: `Constructor`s, which it may call, and plain values.
        max_operations: a longer pickle is refused: each operation may take some 100 bytes of memory.
        persistent_load: makes the objects that lie outside the pickle; None if there must be none.
        start: where the pickle begins.

    Raises:
        CheckpointError: it asks for another name, or is broken, or does what these pickles never do.
    """
    file = io.BytesIO(content)
    file.seek(start)
    machine = _Machine(names, persistent_load)
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(file)):
            if count == max_operations:
                raise ValueError(f"it takes more than {max_operations} operations")
            machine.run(operation.name, argument)
        return machine.stack.pop(), file.tell()
    except _Refused as error:
        reason = f"it asks for {error}, which no weights need and which could run any code"
        raise CheckpointError(f"{path} is refused: {reason}", hint=SAVE_STATE_DICT) from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} holds a broken pickle: {reason}", hint="fetch it again") from None
    except Exception as error:
        # A broken pickle may do anything in any order, so there is no list of what goes wrong.
        reason = f"it makes no sense ({type(error).__name__})"
        raise CheckpointError(f"{path} holds a broken pickle: {reason}", hint="fetch it again") from error


def _can_be_key(value: object) -> bool:
    """Return whether `value` is hashed in no time: tuples nested deep enough overflow the interpreter's stack."""
    if type(value) is tuple:
        return len(value) <= _LONGEST_TUPLE and all(type(part) in _SCALARS for part in value)
    return type(value) in _SCALARS or type(value) is Record


class _Machine:
    """The stack machine that a pickle is a program for."""

    def __init__(self, names: Mapping[str, object], persistent_load: Callable[[object], object] | None) -> None:
        self.stack: list[Any] = []
        self._names = names
        self._persistent_load = persistent_load
        self._below_marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, operation: str, argument: Any) -> None:
        """Do one operation."""
        if operation in _LITERALS:
            self.stack.append(argument)
        elif operation in _CONSTANTS:
            self.stack.append(_CONSTANTS[operation])
        elif operation in _SHORT_TUPLES:
            length = _SHORT_TUPLES[operation]
            self.stack[-length:] = [tuple(self._last(length))]
        elif operation in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self.stack[-1]
        elif operation in ("BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        else:
            method = _METHODS.get(operation)
            if method is None:
                raise ValueError(f"it uses the operation {operation}")
            method(self, argument)

    def _last(self, length: int) -> list[Any]:
        if len(self.stack) < length:
            raise ValueError("it takes more than it has")
        return self.stack[-length:]

    def _since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._below_marks.pop()
        return items

    def _nothing(self, _: Any) -> None:
        """PROTO, FRAME, STOP: nothing to do."""

    def _mark(self, _: Any) -> None:
        self._below_marks.append(self.stack)
        self.stack = []

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def _empty_list(self, _: Any) -> None:
        self.stack.append([])

    def _empty_dict(self, _: Any) -> None:
        self.stack.append({})

    def _tuple(self, _: Any) -> None:
        items = tuple(self._since_mark())
        self.stack.append(items)

    def _append(self, _: Any) -> None:
        item = self.stack.pop()
        self._extend([item])

    def _appends(self, _: Any) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("it appends to something else than a list")
        target.extend(items)

    def _setitem(self, _: Any) -> None:
        pair = self._last(2)
        del self.stack[-2:]
        self._update(pair)

    def _setitems(self, _: Any) -> None:
        self._update(self._since_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("it puts keys into something else than a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not _can_be_key(key):
                raise ValueError("it has a key that is no plain value")
            target[key] = value

    def _global(self, argument: str) -> None:
        self.stack.append(self._find(argument.replace(" ", ".", 1)))

    def _stack_global(self, _: Any) -> None:
        module, name = self._last(2)
        self.stack[-2:] = [self._find(f"{module}.{name}" if type(module) is type(name) is str else "no name")]

    def _find(self, name: str) -> object:
        if name not in self._names:
            raise _Refused(shown(name))
        return self._names[name]

    def _reduce(self, _: Any) -> None:
        function, arguments = self._last(2)
        if type(function) is not Constructor or type(arguments) is not tuple:
            raise ValueError("it calls what is no function")
        self.stack[-2:] = [function.make(*arguments)]

    def _build(self, _: Any) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is Record:
            target.state = state
        elif type(target) is not dict:  # an ordered one, whose attributes nobody needs
            raise ValueError("it changes what cannot be changed")

    def _persistent(self, _: Any) -> None:
        if self._persistent_load is None:
            raise ValueError("it has parts elsewhere")
        self.stack[-1] = self._persistent_load(self.stack[-1])


_METHODS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine._nothing,
    "FRAME": _Machine._nothing,
    "STOP": _Machine._nothing,
    "MARK": _Machine._mark,
    "MEMOIZE": _Machine._memoize,
    "EMPTY_LIST": _Machine._empty_list,
    "EMPTY_SET": _Machine._empty_list,  # no weights are in a set: any container will do
    "EMPTY_DICT": _Machine._empty_dict,
    "TUPLE": _Machine._tuple,
    "FROZENSET": _Machine._tuple,
    "APPEND": _Machine._append,
    "APPENDS": _Machine._appends,
    "ADDITEMS": _Machine._appends,
    "SETITEM": _Machine._setitem,
    "SETITEMS": _Machine._setitems,
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._reduce,
    "NEWOBJ": _Machine._reduce,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._persistent,
}
