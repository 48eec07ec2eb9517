"""Running models on outlines, tensors with sizes but without memory.

Every operation of the real modules then costs microseconds and allocates nothing. `TensorBytes` counts the bytes that
it would have allocated, and `WorkCounter` what a device would compute and move.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from opensora_cli.engine.components.architectures import on_meta
from opensora_cli.engine.estimate.outlines import HOST, OutlineMode
from opensora_cli.memory.counting import DispatchMode, TensorBytes

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_aten = torch.ops.aten


class Need(NamedTuple):
    """Bytes that a computation needs besides its weights."""

    data: int
    activations: int

    @classmethod
    def of(cls, counter: TensorBytes) -> "Need":
        """Return the counted need, while only inputs and outputs are still alive."""
        return cls(counter.live_bytes, counter.peak_bytes - counter.live_bytes)


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


@contextmanager
def fake_device(device_type: str, *, grad: bool = False) -> Iterator[torch.device]:
    """Make outlines instead of tensors inside the block, as operations on a device of this type would.

    Yields the device that represents it, the host itself or another one; the real device need not exist. Autograd
    records operations if `grad` is true.
    """
    is_cpu = device_type == "cpu"
    kernels = nullcontext() if is_cpu else _CudaKernels()
    # Torch allows no mode in inference mode.
    with torch.inference_mode(False), torch.set_grad_enabled(grad), OutlineMode(), kernels:  # type: ignore[no-untyped-call]
        yield HOST if is_cpu else torch.device("meta")


def fake_module(make: Callable[[], ModuleT], *, device: torch.device, dtype: torch.dtype) -> ModuleT:
    """Return the module that `make` builds, in evaluation mode, with fake weights. Call it inside `fake_device`."""
    with on_meta():
        module = make()
    give_fake_weights(module, device=device, dtype=dtype)
    return module.requires_grad_(False).eval()


def give_fake_weights(module: nn.Module, *, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Replace parameters and buffers by fake tensors. Call it inside `fake_device`.

    The module is built on the meta device; layouts stay. `dtype` is the new dtype of floating point tensors; None means
    no change.
    """

    def empty(old: Tensor) -> Tensor:
        new_dtype = dtype if dtype is not None and old.is_floating_point() else old.dtype
        return torch.empty_strided(old.shape, old.stride(), dtype=new_dtype, device=device)

    replace_weights(module, empty)


def replace_weights(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer by what `make` returns for it, in place. Shared weights stay shared."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, old in held.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = make(old)
                    is_parameter = isinstance(old, nn.Parameter) and new is not old
                    made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
                held[name] = made[id(old)]  # type: ignore[assignment]


def repeat_calls(module: nn.Module, *, work: WorkCounter | None = None) -> None:
    """Let a module run once for each shape of its inputs, and afterwards only repeat its allocations and its work.

    The module returns new tensors, and its options never change. `work` counts the work of each call; None means that
    it is not counted.
    """
    run, counter = module.forward, work or WorkCounter()
    known: dict[object, tuple[int, Work, Any]] = {}

    def forward(*inputs: Any, **options: Any) -> Any:
        tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes in known:
            peak_bytes, done, outlines = known[shapes]
            counter.work += done
            torch.empty(peak_bytes, dtype=torch.uint8, device=tensors[0].device)
            return tree_map(torch.empty_like, outlines)
        before = counter.work
        with TensorBytes(device_type=tensors[0].device.type) as memory:
            result = run(*inputs, **options)
        # Only the shapes of the results are stored, as tensors of one element.
        outlines = tree_map(lambda tensor: tensor.new_empty(()).expand(tensor.shape), result)
        known[shapes] = memory.peak_bytes, counter.work - before, outlines
        return result

    module.forward = forward


class _CudaKernels(TorchFunctionMode):
    """Mode that replaces functions by others with the allocations of CUDA's kernels."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, or one that makes the same tensors."""
        return _ON_CUDA.get(func, func)(*args, **(kwargs or {}))


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    """Allocate like flash and memory-efficient attention: the output and, temporarily, one sum per query.

    A mask changes nothing.
    """
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
    return out


def _fused_rms_norm(rows: Tensor, *_: object, **__: object) -> Tensor:
    """Allocate like the kernel: a copy of rows that are not contiguous, one number per row, and the output."""
    rows = rows.contiguous()
    rows.new_empty(rows.shape[:-1], dtype=torch.float32)
    return rows.clone()


def _through_cudnn(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a convolution that temporarily holds a second clip and result: cuDNN's kernels need channels last.

    An H100 took as much, to a tenth, for clips of 130 MiB to 4 GiB in bfloat16 and float32. It took up to 30 MiB more
    for smaller clips; pictures were not measured. Kernels of one tap are matrix products, and take no extra memory.
    """

    def run(clip: Tensor, weight: Tensor, *options: Any, **named: Any) -> Tensor:
        out = convolve(clip, weight, *options, **named)
        if prod(weight.shape[2:]) > 1:
            out.new_empty(clip.nbytes + out.nbytes, dtype=torch.uint8)
        return out

    return run


_ON_CUDA: Mapping[Any, Callable[..., Tensor]] = {
    **{convolve: _through_cudnn(convolve) for convolve in (functional.conv2d, functional.conv3d)},
    functional.scaled_dot_product_attention: _fused_attention,
    functional.rms_norm: _fused_rms_norm,
}
"""Replacements for functions that CUDA's kernels compute with other allocations."""
