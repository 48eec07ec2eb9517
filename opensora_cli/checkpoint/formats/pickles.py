"""Pickles are checked before anything reads them: what they import, and how many operations they have."""

import io
import pickletools
from collections.abc import Collection
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
        depths = _Depths()
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
            depths.follow(operation, argument)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise broken_file(path, error) from None


class _Depths:
    """How deep tuples are nested on the stack of a pickle: hashing very deep ones ends the process."""

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: dict[int, int] = {}

    def follow(self, operation: pickletools.OpcodeInfo, argument: Any) -> None:
        """Do to the depths what an operation does to the objects; ValueError: they are too deep, or not there."""
        name, stack = operation.name, self._stack
        if name == "MARK":
            self._marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        else:
            taken = operation.stack_before
            count = len(taken)
            if pickletools.markobject in taken:
                count = taken.index(pickletools.markobject) + len(stack) - self._marks.pop()
            if count > len(stack):
                raise ValueError("it takes more than it has")
            items = stack[len(stack) - count :]
            del stack[len(stack) - count :]
            depth = 1 + max(items, default=0) if "TUPLE" in name else 0
            if depth > _MAX_DEPTH:
                raise ValueError("it nests tuples too deep")
            stack.extend([depth] * len(operation.stack_after))


def refusal_of_name(path: Path, imported: str) -> CheckpointError:
    """Return the error of a pickle that imports something that only running code could give."""
    reason = f"it imports {shown(imported)}, which no weights need and which could run any code"
    return CheckpointError(f"{path} is refused: {reason}", hint=SAVE_STATE_DICT)


def broken_file(path: Path, error: Exception) -> CheckpointError:
    """Return the error of a file whose pickle cannot be read."""
    # torch puts several lines of advice around what went wrong.
    lines = str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines() or [type(error).__name__]
    return CheckpointError(f"{path} is broken: {plain(lines[0])}", hint=FETCH_AGAIN)
