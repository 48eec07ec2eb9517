"""Running models on tensors that have sizes and no memory: outlines, or torch's fake tensors where gradients are.

Every operation of the real modules then costs microseconds and allocates nothing, and `TensorBytes` counts what it
would have allocated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from opensora_cli.engine.components.on_meta import on_meta
from opensora_cli.engine.estimate.outlines import OutlineMode, clip_layout, convolution_layout
from opensora_cli.memory.counting import TensorBytes

HOST = torch.device("cpu")
"""Stands for the memory of the host, inside `fake_device`."""

_ONE: dict[torch.dtype, bool | int] = {torch.bool: True, torch.int32: 1, torch.int64: 1}

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_Replacements = Mapping[Any, Callable[..., Tensor]]


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a computation needs beside its weights."""

    data: int
    activations: int

    @classmethod
    def of(cls, counter: TensorBytes) -> "Need":
        """Return what was counted; inputs and outputs are still alive, and nothing else is."""
        return cls(counter.live_bytes, counter.peak_bytes - counter.live_bytes)


@contextmanager
def fake_device(device_type: str) -> Iterator[torch.device]:
    """Inside the block, tensors are outlines, and operations make what they make on a device of that type.

    Yields the device that stands for it, which need not be there: the host itself, or another one beside it. Autograd
    records nothing.
    """
    is_cpu = device_type == "cpu"
    kernels = _Kernels(_ON_HOST if is_cpu else _ON_CUDA)
    with torch.inference_mode(False), torch.no_grad(), OutlineMode(), kernels:  # type: ignore[no-untyped-call]
        yield HOST if is_cpu else torch.device("meta")


@contextmanager
def fake_tensors(device_type: str, *, gradients: bool = False) -> Iterator[torch.device]:
    """Do the same with torch's fake tensors, many times slower; `gradients` lets autograd record what is done."""
    is_cpu = device_type == "cpu"
    # A tensor that `torch.tensor` makes on the meta device is not fake, and let in.
    kernels = _CpuKernels() if is_cpu else _Kernels(_ON_CUDA)  # type: ignore[no-untyped-call]
    with (
        torch.inference_mode(False),  # in which torch would let no fake tensor in
        torch.set_grad_enabled(gradients),
        FakeTensorMode(allow_non_fake_inputs=True),
        kernels,
    ):
        yield HOST if is_cpu else torch.device("meta")


def fake_module(make: Callable[[], ModuleT], *, device: torch.device, dtype: torch.dtype) -> ModuleT:
    """Return what `make` builds, in evaluation mode, with fake weights; to be called inside `fake_device`."""
    with on_meta():
        module = make()
    give_fake_weights(module, device=device, dtype=dtype)
    return module.requires_grad_(False).eval()


def give_fake_weights(module: nn.Module, *, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Replace parameters and buffers by fake tensors; to be called inside `fake_device`.

    The module is built on the meta device; layouts and shared weights are kept. `dtype` is for floating point numbers;
    None: as they are.
    """
    made: dict[int, Tensor] = {}

    def empty(old: Tensor) -> Tensor:
        new_dtype = dtype if dtype is not None and old.is_floating_point() else old.dtype
        new = torch.empty_strided(old.shape, old.stride(), dtype=new_dtype, device=device)
        return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, old in held.items():
                if old is not None:
                    held[name] = made.setdefault(id(old), empty(old))  # type: ignore[assignment]


class Repeated(nn.Module):
    """Runs a module once for each shape of its inputs, and afterwards only allocates what it did then.

    The module has no state, and returns new tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._known: dict[object, tuple[int, Any]] = {}

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return tensors of the shapes that the module gives; `options` go to it, and are always the same."""
        tensors: list[Tensor] = tree_leaves(inputs)
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes in self._known:
            peak_bytes, outlines = self._known[shapes]
            torch.empty(peak_bytes, dtype=torch.uint8, device=tensors[0].device)
            return tree_map(torch.empty_like, outlines)
        with TensorBytes(device_type=tensors[0].device.type) as counter:
            result = self._module(*inputs, **options)
        # Of the results only the shapes are kept, as tensors of one element.
        outlines = tree_map(lambda tensor: tensor.new_empty(()).expand(tensor.shape), result)
        self._known[shapes] = counter.peak_bytes, outlines
        return result


class _CpuKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook for subclasses is untyped
    """Does what fake operations do not: lays out clips as a CPU does, which decides where copies are needed.

    A number read from a tensor is 1.
    """

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, or one that makes the same tensors in another layout."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return _ONE.get(args[0].dtype, 1.0)
        if func is torch.ops.aten.mkldnn_convolution.default:
            clip, weight, bias, padding, stride, dilation, groups = args
            result = torch.ops.aten.convolution(clip, weight, bias, stride, padding, dilation, False, [0, 0, 0], groups)
            return torch.empty_like(result, memory_format=clip_layout(clip))
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            with unset_fake_temporarily():
                layout = convolution_layout(*args)
            return torch.empty_like(result, memory_format=layout)
        if func is torch.ops.aten.replication_pad3d.default:
            return torch.empty_like(result, memory_format=clip_layout(args[0]))
        if func is torch.ops.aten.native_group_norm.default:
            return (torch.empty_like(result[0], memory_format=clip_layout(args[0])), *result[1:])
        return result


class _Kernels(TorchFunctionMode):
    """Replaces functions by others that make the tensors that kernels of the device make."""

    def __init__(self, replacements: _Replacements) -> None:
        super().__init__()
        self._replacements = replacements

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, or one that makes the same tensors."""
        return self._replacements.get(func, func)(*args, **(kwargs or {}))


def _group_norm(
    clip: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    clip = clip.contiguous(memory_format=clip_layout(clip))
    batch, channels, *size = clip.shape
    return torch.native_group_norm(clip, weight, bias, batch, channels, prod(size), num_groups, eps)[0]


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    """Return what flash attention and the memory-efficient one make: the output and, for a while, one sum a query.

    A mask changes nothing.
    """
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
    return out


def _fused_rms_norm(rows: Tensor, *_: object, **__: object) -> Tensor:
    """Return what the kernel makes: a copy of rows that are not contiguous, one number a row, and the output."""
    rows = rows.contiguous()
    rows.new_empty(rows.shape[:-1], dtype=torch.float32)
    return rows.clone()


def _through_cudnn(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what convolves and, for a while, has clip and result a second time: cuDNN's kernels want channels last.

    An H100 took as much, to a tenth, for clips of 130 MiB to 4 GiB in bfloat16 and float32, and up to 30 MiB more for
    smaller ones; of pictures it was not measured. Kernels of one tap are products of matrices, and take nothing.
    """

    def run(clip: Tensor, weight: Tensor, *options: Any, **named: Any) -> Tensor:
        out = convolve(clip, weight, *options, **named)
        if prod(weight.shape[2:]) > 1:
            out.new_empty(clip.nbytes + out.nbytes, dtype=torch.uint8)
        return out

    return run


# What torch does on a CPU above its operations, where it sees that none of the tensors is on one.
_ON_HOST: _Replacements = {
    functional.scaled_dot_product_attention: _fused_attention,
    functional.group_norm: _group_norm,
}
# What makes other tensors on a device that is not known to have CUDA's kernels.
_ON_CUDA: _Replacements = {
    **{convolve: _through_cudnn(convolve) for convolve in (functional.conv2d, functional.conv3d)},
    functional.scaled_dot_product_attention: _fused_attention,
    functional.rms_norm: _fused_rms_norm,
}
