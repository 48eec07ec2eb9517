"""Outlines: tensors with a shape, a layout, a dtype and a device, but without memory.

Torch's own fake tensors know every operation, but take a second to load and a third of a millisecond per operation.
Outlines have fast rules for the operations that models use most: only the sizes of the results are computed.
"""

from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial, reduce
from itertools import zip_longest
from math import ceil
from typing import Any

import torch
from torch import Tensor

from opensora_cli.memory.counting import DispatchMode, is_wrapper

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
"""Operation with which torch's own code asks a tensor for its device."""
_READ_NUMBER = _aten._local_scalar_dense.default
_ONE: dict[torch.dtype, bool | int] = {torch.bool: True, torch.int32: 1, torch.int64: 1}
_META = torch.device("meta")
HOST = torch.device("cpu")
"""Device that represents the memory of the host."""


class HostOutline(Tensor):
    """Outline in the memory of the host; an outline on a GPU is a plain meta tensor.

    It is a meta tensor that torch dispatches like a tensor on a CPU, also in autocast and autograd.
    """

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the host."""
        return HOST

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Whether the tensor has no values, which code that loops over parts of a tensor asks."""
        return True

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own signature has one of a disabled function
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse an operation outside of `OutlineMode`, whose kernel would read memory that does not exist."""
        if func is _DEVICE:
            return HOST
        raise RuntimeError(f"{func} ran on an outline outside of its mode")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"HostOutline({tuple(self.shape)}, {self.dtype})"


class OutlineMode(DispatchMode):  # type: ignore[no-untyped-call]  # torch's hook for subclasses is untyped
    """Mode whose operations make outlines on the requested device: the host, or a GPU as the meta device.

    A number read from an outline is 1. Operations on real tensors alone are computed. Operations without a rule here
    are torch's own on the meta device.
    """

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the outlines of an operation's results."""
        options = kwargs or {}
        if func is _DEVICE:
            return args[0].device
        if any(map(is_wrapper, types)):
            # Its operations on the inner tensors also arrive here.
            return NotImplemented
        has_reals, on_host, has_outlines = False, True, False
        for tensor in _tensors(args):
            if type(tensor) is HostOutline:
                has_outlines = True
            elif tensor.is_meta:
                # A host tensor beside a GPU tensor is a number.
                has_outlines, on_host = True, False
            else:
                has_reals = True
        if has_reals and not has_outlines and "device" not in options:
            # Such as the ranks of a device mesh, whose values torch reads.
            return func(*args, **options)
        if "out" in options or _is_in_place(func):
            return options.get("out", args[0]) if func._schema.returns else None
        if func is _READ_NUMBER:
            return _ONE.get(args[0].dtype, 1.0)
        if (device := options.get("device")) is not None:
            on_host = device.type == "cpu"
        # The rules read outlines, which refuse operations outside of the mode.
        with torch._C._DisableTorchDispatch():
            result = _outlined(func, args, options)
            return _placed(result) if on_host else result


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    found = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += [part for part in arg if isinstance(part, Tensor)]
    return found


def _is_on_host(tensor: Tensor) -> bool:
    return type(tensor) is HostOutline or not tensor.is_meta


@cache
def _is_in_place(func: Any) -> bool:
    schema = func._schema  # of `__lshift__`, too
    return schema.is_mutable and schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags


def _outlined(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the results of an operation on the meta device, with the layouts of a CPU if its tensors are there."""
    if "device" in options:
        options = {**options, "device": _META}
        options.pop("pin_memory", None)
    if (rule := _RULES.get(func)) is not None:
        return rule(*args, **options)
    return func(*map(_on_meta, args), **options)


def _placed(result: Any) -> Any:
    """Return meta tensors as outlines on the host."""
    if isinstance(result, HostOutline):
        return result
    if isinstance(result, Tensor):
        return Tensor._make_subclass(HostOutline, result, dispatch_device=True, device_for_backend_keys=HOST)
    return type(result)(map(_placed, result)) if isinstance(result, (list, tuple)) else result


def _on_meta(arg: Any) -> Any:
    """Replace tensors by meta tensors, including results of `torch.tensor`."""
    if isinstance(arg, (list, tuple)):
        return [_on_meta(part) for part in arg]
    if isinstance(arg, HostOutline):
        return Tensor._make_subclass(Tensor, arg, device_for_backend_keys=_META)
    if isinstance(arg, Tensor) and not arg.is_meta:
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=_META)
    return arg


def _empty(shape: Iterable[int], dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=_META, memory_format=layout)


def _like(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = torch.preserve_format,
    **_: object,
) -> Tensor:
    """Return the result of `torch.empty_like`, which itself would import sympy; other options have no effect."""
    dtype = dtype or tensor.dtype
    if memory_format not in (None, torch.preserve_format):
        return _empty(tensor.shape, dtype, memory_format)
    strides = _dense_strides(tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, strides, dtype=dtype, device=_META)


@lru_cache(maxsize=4096)
def _dense_strides(shape: torch.Size, layout: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides without gaps and repeated values. An axis that repeats values stays beside the next one."""
    order = list(layout)
    for axis in reversed(range(len(shape) - 1)):
        order[axis] = order[axis] or order[axis + 1]
    strides, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda axis: (order[axis], -axis)):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _clip_layout(clip: Tensor) -> torch.memory_format:
    """Return the layout of a clip or picture. A CPU's kernels that change only values keep this layout."""
    layout = _CHANNELS_LAST.get(clip.ndim, torch.contiguous_format)
    return layout if clip.is_contiguous(memory_format=layout) else torch.contiguous_format


def _kernel_layout(clip: Tensor) -> torch.memory_format:
    """Return the layout of the result of kernels that keep it on a CPU alone."""
    return _clip_layout(clip) if _is_on_host(clip) else torch.contiguous_format


def _statistics_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype of the mean and deviation that a normalization returns."""
    return values.dtype if _is_on_host(values) or values.dtype.itemsize >= 4 else torch.float32


def _common_shape(tensors: Iterable[Tensor]) -> torch.Size:
    # `torch.broadcast_shapes` would import sympy, for half a second.
    return torch.Size(map(max, zip_longest(*(tensor.shape[::-1] for tensor in tensors), fillvalue=1)))[::-1]


def _elementwise(*args: Any, floats: bool = False, **_: object) -> Tensor:
    """Return the result that TensorIterator allocates, in the layout of the first operand with the common shape."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    # Numbers and 0-d tensors count less than tensors with axes.
    main = max(tensors, key=Tensor.dim)
    operands = (arg for arg in args if isinstance(arg, (Tensor, int, float)))
    dtype = reduce(torch.promote_types, (torch.result_type(main, operand) for operand in operands))
    if floats and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    shape = _common_shape(tensors)
    whole = next((tensor for tensor in tensors if tensor.shape == shape), None)
    return _like(tensors[0].expand(shape) if whole is None else whole, dtype=dtype)


def _joined(tensors: list[Tensor], dim: int = 0) -> Tensor:
    # Tensors without elements may have another shape.
    parts = [part for part in tensors if part.ndim > 1 or part.numel()] or tensors
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    dtype = reduce(torch.promote_types, (part.dtype for part in tensors))
    layouts = set(map(_clip_layout, parts))
    return _empty(shape, dtype, layouts.pop() if len(layouts) == 1 else torch.contiguous_format)


def _stacked(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return _empty(shape, tensors[0].dtype)


def _repeated(tensor: Tensor, times: list[int]) -> Tensor:
    sizes = zip_longest(tensor.shape[::-1], times[::-1], fillvalue=1)
    return _empty([size * count for size, count in sizes][::-1], tensor.dtype)


def _product(*operands: Tensor, **_: object) -> Tensor:
    """Return the product of the last two operands; an addend may come before them."""
    left, right = operands[-2:]
    return _empty((*left.shape[:-1], right.shape[-1]), left.dtype)


def _arange(*numbers: float, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    start, end, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
    default = torch.int64 if all(isinstance(number, int) for number in numbers) else torch.get_default_dtype()
    return _empty([ceil((end - start) / step)], dtype or default)


def _reduced(
    values: Tensor,
    dims: int | list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    counts: bool = False,
) -> Tensor:
    """Return the result of a reduction along some axes, None means all of them; `counts` makes integers int64."""
    named = [dims] if isinstance(dims, int) else dims or range(values.ndim)
    axes = {dim % values.ndim for dim in named}
    sizes = [1 if axis in axes else size for axis, size in enumerate(values.shape) if keepdim or axis not in axes]
    default = torch.int64 if counts and not values.dtype.is_floating_point else values.dtype
    return _empty(sizes, dtype or default)


def _layer_norm(rows: Tensor, shape: list[int], *_: object) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [*rows.shape[: rows.ndim - len(shape)], *[1] * len(shape)]
    return _like(rows), _empty(sizes, _statistics_dtype(rows)), _empty(sizes, _statistics_dtype(rows))


def _group_norm(
    clip: Tensor, weight: Any, bias: Any, batch: int, channels: int, size: int, groups: int, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (_empty((batch, groups), _statistics_dtype(clip)) for _ in range(2))
    return _like(clip, memory_format=_kernel_layout(clip)), mean, rstd


def _batch_norm(clip: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    # Mean and variance are given, and a CPU does not return them.
    size = 0 if _is_on_host(clip) else clip.shape[1]
    return _like(clip), _empty([size], _statistics_dtype(clip)), _empty([size], _statistics_dtype(clip))


def _attention(query: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _width = query.shape
    return _like(query), _empty((batch, tokens, heads), torch.float32).transpose(1, 2)


def _convolution(
    clip: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    *options: Any,
) -> Tensor:
    layout = _clip_layout(clip)
    if transposed:
        given = clip, weight, bias, stride, padding, dilation, transposed, *options
        return _like(_aten.convolution.default(*map(_on_meta, given)), memory_format=layout)
    return _convolved(clip, weight, stride, padding, dilation, layout)


def _convolved(
    clip: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    layout: torch.memory_format,
) -> Tensor:
    steps = zip(clip.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    sizes = ((size + 2 * side - gap * (taps - 1) - 1) // step + 1 for size, taps, step, side, gap in steps)
    return _empty((clip.shape[0], weight.shape[0], *sizes), clip.dtype, layout)


def _padding(clip: Tensor, sides: list[int]) -> Tensor:
    # The padding has a pair of sides for each axis, the last axis first.
    added = map(sum, zip(sides[::-2], sides[-2::-2], strict=True))
    shape = *clip.shape[:-3], *map(sum, zip(clip.shape[-3:], added, strict=True))
    return _empty(shape, clip.dtype, _kernel_layout(clip))


def _for_each(rule: Callable[..., Any], *funcs: Any) -> dict[Any, Callable[..., Any]]:
    return dict.fromkeys(funcs, rule)


_RULES: dict[Any, Callable[..., Any]] = {
    **_for_each(
        _elementwise,
        *(_aten.add.Tensor, _aten.sub.Tensor, _aten.rsub.Scalar, _aten.mul.Tensor, _aten.mul.Scalar),
        *(_aten.neg.default, _aten.abs.default, _aten.clamp.default, _aten.round.default, _aten.relu.default),
        *(_aten.lerp.Scalar, _aten.pow.Tensor_Scalar, _aten.addcmul.default),
    ),
    # These turn integers into floating point numbers.
    **_for_each(
        partial(_elementwise, floats=True),
        *(_aten.div.Tensor, _aten.reciprocal.default, _aten.sqrt.default, _aten.rsqrt.default, _aten.pow.Scalar),
        *(_aten.cos.default, _aten.sin.default, _aten.exp.default, _aten.log.default),
        *(_aten.sigmoid.default, _aten.silu.default, _aten.gelu.default),
    ),
    **_for_each(
        _like,
        *(_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default),
        *(_aten.clone.default, _aten._to_copy.default),
    ),
    _aten.flip.default: lambda tensor, _: _like(tensor),
    **_for_each(
        lambda *args: _like(_elementwise(*args), dtype=torch.bool), _aten.lt.Scalar, _aten.gt.Scalar, _aten.eq.Scalar
    ),
    **_for_each(_product, _aten.mm.default, _aten.bmm.default, _aten.addmm.default),
    **_for_each(_arange, _aten.arange.default, _aten.arange.start, _aten.arange.start_step),
    _aten.cat.default: _joined,
    _aten.stack.default: _stacked,
    _aten.repeat.default: _repeated,
    _aten.where.self: lambda *args: _like(_elementwise(*args), dtype=_elementwise(*args[1:]).dtype),
    _aten.embedding.default: lambda weight, ids, *_: _empty((*ids.shape, weight.shape[1]), weight.dtype),
    _aten.index.Tensor: lambda values, indices: _empty(
        (*_common_shape(indices), *values.shape[len(indices) :]), values.dtype
    ),
    _aten.argmax.default: partial(_reduced, dtype=torch.int64),
    _aten.mean.dim: _reduced,
    _aten.sum.dim_IntList: partial(_reduced, counts=True),
    _aten.linalg_vector_norm.default: lambda values, order=2, *args, **options: _reduced(values, *args, **options),
    _aten.var_mean.correction: lambda *args, correction=1, **options: [_reduced(*args, **options) for _ in range(2)],
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_batch_norm.default: _batch_norm,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten.convolution.default: _convolution,
    _aten.mkldnn_convolution.default: lambda clip, weight, bias, padding, stride, dilation, groups: _convolved(
        clip, weight, stride, padding, dilation, _clip_layout(clip)
    ),
    _aten.replication_pad3d.default: _padding,
    _aten.upsample_nearest3d.default: lambda clip, size, *_: _empty(
        (*clip.shape[:2], *size), clip.dtype, _clip_layout(clip)
    ),
}
"""Results on the meta device. They avoid torch's own functions in Python, which are slow and import sympy."""
