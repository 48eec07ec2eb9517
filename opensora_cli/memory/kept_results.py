"""Which results a checkpointed block keeps, so that it does not compute them again: those that cost most for their
bytes.

A product of matrices over a width K takes 2·K operations for each number of its result, attention to M tokens 4·M;
everything else takes about one, and is cheaper to compute again than to hold. It is torch's selective checkpointing.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_LEFT_OPERAND = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten._scaled_mm.default: 0,
}
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
_CLOSE = 0.99
"""Shares of the tokens differ from rank to rank by one, and so does the cost of attention."""
_HALF = 2
"""Bytes of a number of a result: those of products in 8 bits have two."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one result costs."""

    operations_a_byte: float
    operations: float
    is_attention: bool


def keeping(operations_a_byte: float) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a checkpoint's forward pass, and of its second one, which keep what costs so much."""

    def policy(context: object, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = _operations_a_byte(operation, args) >= _CLOSE * operations_a_byte
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return first, second


class CostCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook for subclasses is untyped
    """Adds to `found` what results of products and of attention cost that are computed inside its block."""

    def __init__(self, found: list[Cost]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note what it costs."""
        result = func(*args, **(kwargs or {}))
        a_byte = _operations_a_byte(func, args)
        if a_byte:
            made: Tensor = result[0] if isinstance(result, tuple) else result
            self._found.append(Cost(a_byte, a_byte * made.numel() * made.itemsize, func in _ATTENTION))
        return result


def _operations_a_byte(operation: Any, args: tuple[Any, ...]) -> float:
    """Return the operations for each byte of a result; 0 for what is neither product nor attention."""
    if operation in _ATTENTION:
        keys: Tensor = args[1]
        return 4 * keys.shape[-2] / keys.itemsize
    if operation in _LEFT_OPERAND:
        left: Tensor = args[_LEFT_OPERAND[operation]]
        return 2 * left.shape[-1] / max(left.itemsize, _HALF)
    return 0.0
