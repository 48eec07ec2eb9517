"""Running models on tensors with sizes but without memory: outlines, or torch's fake tensors if gradients are needed.

Every operation of the real modules then costs microseconds and allocates nothing. `TensorBytes` counts the bytes that
it would have allocated.
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
from opensora_cli.engine.estimate.work import Work, WorkCounter
from opensora_cli.memory.counting import TensorBytes

HOST = torch.device("cpu")
"""Device that represents the memory of the host, inside `fake_device`."""

_ONE: dict[torch.dtype, bool | int] = {torch.bool: True, torch.int32: 1, torch.int64: 1}

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_Replacements = Mapping[Any, Callable[..., Tensor]]


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a computation needs besides its weights."""

    data: int
    activations: int

    @classmethod
    def of(cls, counter: TensorBytes) -> "Need":
        """Return the counted need, while only inputs and outputs are still alive."""
        return cls(counter.live_bytes, counter.peak_bytes - counter.live_bytes)


@contextmanager
def fake_device(device_type: str) -> Iterator[torch.device]:
    """Make outlines instead of tensors inside the block, as operations on a device of this type would.

    Yields the device that represents it, the host itself or another one; the real device need not exist. Autograd
    records nothing.
    """
    is_cpu = device_type == "cpu"
    kernels = _Kernels(_ON_HOST if is_cpu else _ON_CUDA)
    with torch.inference_mode(False), torch.no_grad(), OutlineMode(), kernels:  # type: ignore[no-untyped-call]
        yield HOST if is_cpu else torch.device("meta")


@contextmanager
def fake_training_tensors() -> Iterator[None]:
    """Make torch's fake tensors inside the block, many times slower than outlines, with gradients, as on a CPU."""
    with (
        torch.inference_mode(False),  # torch allows no fake tensor in inference mode
        torch.set_grad_enabled(True),
        # Results of `torch.tensor` on the meta device are not fake, and are allowed.
        FakeTensorMode(allow_non_fake_inputs=True),
        _CpuKernels(),  # type: ignore[no-untyped-call]
    ):
        yield


def fake_module(make: Callable[[], ModuleT], *, device: torch.device, dtype: torch.dtype) -> ModuleT:
    """Return the module that `make` builds, in evaluation mode, with fake weights. Call it inside `fake_device`."""
    with on_meta():
        module = make()
    give_fake_weights(module, device=device, dtype=dtype)
    return module.requires_grad_(False).eval()


def give_fake_weights(module: nn.Module, *, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Replace parameters and buffers by fake tensors. Call it inside `fake_device`.

    The module is built on the meta device; layouts and shared weights stay. `dtype` is the new dtype of floating point
    tensors; None means no change.
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
    """Module that runs another one once for each input shape, and afterwards only repeats its allocations and its work.

    The wrapped module has no state, and returns new tensors.

    Args:
        module: module to wrap.
        work: counter of the work of each call; None means that it is not counted.
    """

    def __init__(self, module: nn.Module, *, work: WorkCounter | None = None) -> None:
        super().__init__()
        self._module, self._work = module, work or WorkCounter()
        self._known: dict[object, tuple[int, Work, Any]] = {}

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return tensors with the shapes of the module's results. `options` go to the module, and never change."""
        tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes in self._known:
            peak_bytes, work, outlines = self._known[shapes]
            self._work.work += work
            torch.empty(peak_bytes, dtype=torch.uint8, device=tensors[0].device)
            return tree_map(torch.empty_like, outlines)
        before = self._work.work
        with TensorBytes(device_type=tensors[0].device.type) as counter:
            result = self._module(*inputs, **options)
        # Only the shapes of the results are stored, as tensors of one element.
        outlines = tree_map(lambda tensor: tensor.new_empty(()).expand(tensor.shape), result)
        self._known[shapes] = counter.peak_bytes, self._work.work - before, outlines
        return result


class _CpuKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook for subclasses is untyped
    """Mode that gives clips the layout of a CPU, unlike fake operations. The layout decides where copies are needed.

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
    """Mode that replaces functions by others with the allocations of the device's kernels."""

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


# Replacements for functions in which torch would see that no tensor is on a CPU.
_ON_HOST: _Replacements = {
    functional.scaled_dot_product_attention: _fused_attention,
    functional.group_norm: _group_norm,
}
# Replacements for functions with other allocations than those of CUDA's kernels.
_ON_CUDA: _Replacements = {
    **{convolve: _through_cudnn(convolve) for convolve in (functional.conv2d, functional.conv3d)},
    functional.scaled_dot_product_attention: _fused_attention,
    functional.rms_norm: _fused_rms_norm,
}
