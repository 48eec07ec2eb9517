"""Running models on outlines, tensors with sizes but without memory.

Every operation of the real modules then costs microseconds and allocates nothing. `TensorBytes` counts the bytes that
it would have allocated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from opensora_cli.engine.components.architectures import on_meta
from opensora_cli.engine.estimate.outlines import HOST, OutlineMode
from opensora_cli.engine.estimate.work import Work, WorkCounter
from opensora_cli.memory.counting import TensorBytes

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Need(NamedTuple):
    """Bytes that a computation needs besides its weights."""

    data: int
    activations: int

    @classmethod
    def of(cls, counter: TensorBytes) -> "Need":
        """Return the counted need, while only inputs and outputs are still alive."""
        return cls(counter.live_bytes, counter.peak_bytes - counter.live_bytes)


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


def extrapolated(count: Callable[[int], Need], length: int, *, step: int, few: int) -> Need:
    """Return `count(length)` from shorter lengths: every step more adds the same bytes; `few` is the shortest."""
    more = (length - few) // step
    if more <= 1:
        return count(length)
    near, far = count(length - more * step), count(length - (more - 1) * step)
    return Need(*(first + more * (second - first) for first, second in zip(near, far, strict=True)))


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
