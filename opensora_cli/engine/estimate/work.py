"""Work of models, counted on fake tensors: operations of products and of attention, and bytes that kernels move."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from opensora_cli.memory.counting import DispatchMode

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Work:
    """Operations and memory traffic of a device."""

    product_flops: float = 0.0
    """Floating-point operations of products of matrices and of convolutions: two for each multiplication."""
    attention_flops: float = 0.0
    """Floating-point operations of fused attention."""
    product_bytes: float = 0.0
    """Bytes that products read and write."""
    traffic_bytes: float = 0.0
    """Bytes that all other kernels read and write, without fusion by a compiler."""
    kernels: float = 0.0
    """Number of kernels that are started."""
    eight_bit_flops: float = 0.0
    """Operations of matrix products in 8 bits, which `product_flops` does not include."""
    eight_bit_bytes: float = 0.0
    """Bytes that matrix products in 8 bits read and write."""

    def __add__(self, other: "Work") -> "Work":
        """Return the sum of both."""
        return Work(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Work") -> "Work":
        """Return this work without `other`, which is a part of it."""
        return self + other * -1

    def __mul__(self, times: float) -> "Work":
        """Return the work `times` over."""
        return Work(*(times * each for each in astuple(self)))


class WorkCounter(DispatchMode):
    """Counter of the work on the device inside its block, which must be inside `fake_device` for a GPU.

    A kernel reads its operands and writes its results once; caches are ignored.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def count_times(self, module: nn.Module, times: int) -> None:
        """Count the work of each call of a module `times` over, for the modules that it represents."""
        run = module.forward

        def forward(*inputs: Any, **options: Any) -> Any:
            before = self.work
            result = run(*inputs, **options)
            self.work += (self.work - before) * (times - 1)
            return result

        module.forward = forward

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it."""
        result = func(*args, **(kwargs or {}))
        if func.is_view or func in _FREE:
            return result
        tensors = [part for part in tree_leaves((args, kwargs, result)) if isinstance(part, Tensor)]
        if not tensors or any(part.device.type == "cpu" and part.ndim for part in tensors):
            return result  # on the host
        moved = sum(map(_held_bytes, tensors))
        kind = func.overloadpacket
        flops = _FLOPS[kind](*args, out_val=result) if kind in _FLOPS else 0
        if not flops:
            self.work += Work(traffic_bytes=moved, kernels=1)
        elif kind in _IN_8_BITS:
            self.work += Work(eight_bit_flops=flops, eight_bit_bytes=moved, kernels=1)
        elif kind is _ATTENTION:
            self.work += Work(attention_flops=flops, kernels=1)
        else:
            self.work += Work(product_flops=flops, product_bytes=moved, kernels=1)
        return result


def _held_bytes(tensor: Tensor) -> int:
    # An expanded tensor is read once.
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


_ATTENTION, _INT8 = _aten._scaled_dot_product_flash_attention_for_cpu, _aten._int_mm
_IN_8_BITS = frozenset({_INT8, _aten._scaled_mm})
_FLOPS = {
    **flop_registry,
    _INT8: flop_registry[_aten.mm],
    _ATTENTION: flop_registry[_aten._scaled_dot_product_flash_attention],
}
_FREE = frozenset(
    {_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default}
    | {_aten.new_empty_strided.default, _aten._unsafe_view.default, _aten._local_scalar_dense.default}
    | {_aten.lift_fresh.default, _aten.detach.default}
)
"""Operations that start no kernel on the device."""
