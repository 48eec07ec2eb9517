"""Outlines: tensors with a shape, a layout, a dtype and a device, but without memory.

Torch's own fake tensors know every operation, but take a second to load and a third of a millisecond per operation.
Outlines have fast rules for the operations that models use most: only the sizes of the results are computed.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, reduce
from itertools import zip_longest
from math import ceil
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
"""Operation with which torch's own code asks a tensor for its device."""
_META = torch.device("meta")
HOST = torch.device("cpu")

_KEEP_DTYPE = frozenset(
    {
        _aten.add.Tensor,
        _aten.sub.Tensor,
        _aten.rsub.Scalar,
        _aten.mul.Tensor,
        _aten.mul.Scalar,
        _aten.neg.default,
        _aten.abs.default,
    }
    | {_aten.clamp.default, _aten.round.default, _aten.minimum.default, _aten.relu.default, _aten.lerp.Scalar}
    | {_aten.pow.Tensor_Scalar, _aten.lerp.Tensor, _aten.addcmul.default}
)
"""Elementwise operations whose result has the promoted dtype of their operands."""
_GIVE_FLOATS = frozenset(
    {_aten.div.Tensor, _aten.cos.default, _aten.sin.default, _aten.exp.default, _aten.log.default, _aten.tanh.default}
    | {_aten.rsqrt.default, _aten.sqrt.default, _aten.sigmoid.default, _aten.silu.default, _aten.gelu.default}
    | {_aten.reciprocal.default, _aten.pow.Scalar}
)
"""Elementwise operations that turn integers into floating point numbers."""


class HostOutline(Tensor):
    """Outline in the memory of the host; an outline on a GPU is a plain meta tensor.

    It is a meta tensor that torch dispatches like a tensor on a CPU, also in autocast and autograd.
    """

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the host."""
        return HOST

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own signature has one of a disabled function
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse an operation outside of `OutlineMode`, whose kernel would read memory that does not exist."""
        if func is DEVICE:
            return HOST
        raise RuntimeError(f"{func} ran on an outline outside of its mode")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"HostOutline({tuple(self.shape)}, {self.dtype})"


def _on_meta(arg: Any) -> Any:
    """Replace tensors by meta tensors, including results of `torch.tensor`."""
    if isinstance(arg, (list, tuple)):
        return [_on_meta(part) for part in arg]
    if isinstance(arg, HostOutline):
        return Tensor._make_subclass(Tensor, arg, device_for_backend_keys=_META)
    if isinstance(arg, Tensor) and not arg.is_meta:
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=_META)
    return arg


def _elementwise(args: tuple[Any, ...], *, floats: bool = False) -> Tensor:
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


def _common_shape(tensors: Iterable[Tensor]) -> torch.Size:
    # `torch.broadcast_shapes` would import sympy, for half a second.
    return torch.Size(map(max, zip_longest(*(tensor.shape[::-1] for tensor in tensors), fillvalue=1)))[::-1]


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
        return torch.empty(tensor.shape, dtype=dtype, device=_META, memory_format=memory_format)
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


def _copied(on_host: bool, tensor: Tensor, *_: object, **options: Any) -> Tensor:
    return _like(tensor, **options)


def _joined(on_host: bool, tensors: list[Tensor], dim: int = 0) -> Tensor:
    # Tensors without elements may have another shape.
    parts = [part for part in tensors if part.ndim > 1 or part.numel()] or tensors
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    dtype = reduce(torch.promote_types, (part.dtype for part in tensors))
    layout = next(iter(layouts)) if len(layouts := set(map(clip_layout, parts))) == 1 else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=_META, memory_format=layout)


def _stacked(on_host: bool, tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return torch.empty(shape, dtype=tensors[0].dtype, device=_META)


def _repeated(on_host: bool, tensor: Tensor, times: list[int]) -> Tensor:
    sizes = zip_longest(tensor.shape[::-1], times[::-1], fillvalue=1)
    return torch.empty([size * count for size, count in sizes][::-1], dtype=tensor.dtype, device=_META)


def _product(on_host: bool, *operands: Tensor, **_: object) -> Tensor:
    """Return the product of the last two operands; an addend may come before them."""
    left, right = operands[-2:]
    return torch.empty((*left.shape[:-1], right.shape[-1]), dtype=left.dtype, device=_META)


def _compared(on_host: bool, *operands: Any) -> Tensor:
    return _like(_elementwise(operands), dtype=torch.bool)


def _chosen(on_host: bool, condition: Tensor, *values: Tensor) -> Tensor:
    return _like(_elementwise((condition, *values)), dtype=_elementwise(values).dtype)


def _embedded(on_host: bool, weight: Tensor, ids: Tensor, *_: object) -> Tensor:
    return torch.empty((*ids.shape, weight.shape[1]), dtype=weight.dtype, device=_META)


def _indexed(on_host: bool, values: Tensor, indices: list[Tensor]) -> Tensor:
    return torch.empty((*_common_shape(indices), *values.shape[len(indices) :]), dtype=values.dtype, device=_META)


def _reduced(
    on_host: bool,
    values: Tensor,
    dims: int | list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the result of a reduction along some axes; None means all of them."""
    named = [dims] if isinstance(dims, int) else dims or range(values.ndim)
    axes = {dim % values.ndim for dim in named}
    sizes = [1 if axis in axes else size for axis, size in enumerate(values.shape) if keepdim or axis not in axes]
    return torch.empty(sizes, dtype=dtype or values.dtype, device=_META)


def _argmax(on_host: bool, values: Tensor, *options: Any) -> Tensor:
    return _reduced(on_host, values, *options, dtype=torch.int64)


def _sum(on_host: bool, values: Tensor, *options: Any, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or (values.dtype if values.dtype.is_floating_point else torch.int64)
    return _reduced(on_host, values, *options, dtype=dtype)


def _vector_norm(on_host: bool, values: Tensor, order: float = 2, *options: Any, **named: Any) -> Tensor:
    return _reduced(on_host, values, *options, **named)


def _var_mean(
    on_host: bool, values: Tensor, dims: list[int] | None = None, *, correction: float = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return _reduced(on_host, values, dims, keepdim), _reduced(on_host, values, dims, keepdim)


def _layer_norm(on_host: bool, rows: Tensor, shape: list[int], *weights: Any) -> tuple[Tensor, Tensor, Tensor]:
    reduced = [*rows.shape[: rows.ndim - len(shape)], *[1] * len(shape)]
    dtype = rows.dtype if on_host else _accumulated(rows.dtype)
    mean, rstd = (torch.empty(reduced, dtype=dtype, device=_META) for _ in range(2))
    return _like(rows), mean, rstd


def _group_norm(
    on_host: bool, clip: Tensor, weight: Any, bias: Any, batch: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = clip.dtype if on_host else _accumulated(clip.dtype)
    mean, rstd = (torch.empty(batch, groups, dtype=dtype, device=_META) for _ in range(2))
    layout = clip_layout(clip) if on_host else torch.contiguous_format
    return _like(clip, memory_format=layout), mean, rstd


def _batch_norm(on_host: bool, clip: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    # Mean and variance are given, and a CPU does not return them.
    size, dtype = (0, clip.dtype) if on_host else (clip.shape[1], _accumulated(clip.dtype))
    mean, rstd = (torch.empty(size, dtype=dtype, device=_META) for _ in range(2))
    return _like(clip), mean, rstd


def _attention(
    on_host: bool, query: Tensor, key: Tensor, value: Tensor, *options: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = query.shape
    sums = torch.empty((batch, tokens, heads), dtype=torch.float32, device=_META)
    return _like(query), sums.transpose(1, 2)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _convolution(
    on_host: bool,
    clip: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    *options: Any,
) -> Tensor:
    given = clip, weight, bias, stride, padding, dilation, transposed, *options
    layout = convolution_layout(*given) if on_host else clip_layout(clip)
    if transposed:
        return _like(_aten.convolution.default(*map(_on_meta, given)), memory_format=layout)
    steps = zip(clip.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    sizes = ((size + 2 * side - gap * (taps - 1) - 1) // step + 1 for size, taps, step, side, gap in steps)
    shape = clip.shape[0], weight.shape[0], *sizes
    return torch.empty(shape, dtype=clip.dtype, device=_META, memory_format=layout)


def _onednn_convolution(on_host: bool, clip: Tensor, weight: Tensor, bias: Any, *options: Any) -> Tensor:
    padding, stride, dilation, groups = options
    return _convolution(False, clip, weight, bias, stride, padding, dilation, False, [0, 0, 0], groups)


def _arange(
    on_host: bool, *numbers: float, dtype: torch.dtype | None = None, device: torch.device, **_: object
) -> Tensor:
    start, end, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
    default = torch.int64 if all(isinstance(number, int) for number in numbers) else torch.get_default_dtype()
    return torch.empty(ceil((end - start) / step), dtype=dtype or default, device=device)


def _padding(on_host: bool, clip: Tensor, sides: list[int]) -> Tensor:
    # The padding has a pair of sides for each axis, the last axis first.
    added = map(sum, zip(sides[::-2], sides[-2::-2], strict=True))
    shape = *clip.shape[:-3], *map(sum, zip(clip.shape[-3:], added, strict=True))
    layout = clip_layout(clip) if on_host else torch.contiguous_format
    return torch.empty(shape, dtype=clip.dtype, device=_META, memory_format=layout)


def _upsampled(on_host: bool, clip: Tensor, size: list[int], *scales: float | None) -> Tensor:
    return torch.empty((*clip.shape[:2], *size), dtype=clip.dtype, device=_META, memory_format=clip_layout(clip))


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def clip_layout(clip: Tensor) -> torch.memory_format:
    """Return the layout of a clip or picture. A CPU's kernels that change only values keep this layout."""
    layout = _CHANNELS_LAST.get(clip.ndim, torch.contiguous_format)
    return layout if clip.is_contiguous(memory_format=layout) else torch.contiguous_format


def convolution_layout(clip: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> torch.memory_format:
    """Return the layout of the result of a CPU's convolution. Call it outside of modes."""
    # Tensors of one element represent the real ones: torch chooses by shape and dtype.
    shapes = [torch.empty((), dtype=tensor.dtype).expand(tensor.shape) for tensor in (clip, weight)]
    shapes_of_bias = None if bias is None else torch.empty((), dtype=bias.dtype).expand(bias.shape)
    backend = torch._C._select_conv_backend(*shapes, shapes_of_bias, *options, None)
    layout: torch.memory_format = torch._C._conv_determine_backend_memory_format(clip, weight, backend)
    return layout


_RULES: dict[Any, Callable[..., Any]] = {
    _aten.empty_like.default: _copied,
    _aten.zeros_like.default: _copied,
    _aten.ones_like.default: _copied,
    _aten.full_like.default: _copied,
    _aten.clone.default: _copied,
    _aten.flip.default: _copied,
    _aten._to_copy.default: _copied,
    _aten.cat.default: _joined,
    _aten.stack.default: _stacked,
    _aten.repeat.default: _repeated,
    _aten.mm.default: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: _product,
    **dict.fromkeys((_aten.lt.Scalar, _aten.gt.Scalar, _aten.eq.Scalar), _compared),
    _aten.where.self: _chosen,
    _aten.embedding.default: _embedded,
    _aten.index.Tensor: _indexed,
    _aten.argmax.default: _argmax,
    _aten.mean.dim: _reduced,
    _aten.sum.dim_IntList: _sum,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten.var_mean.correction: _var_mean,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_batch_norm.default: _batch_norm,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten.convolution.default: _convolution,
    _aten.mkldnn_convolution.default: _onednn_convolution,
    _aten.replication_pad3d.default: _padding,
    _aten.upsample_nearest3d.default: _upsampled,
    _aten.arange.default: _arange,
    _aten.arange.start: _arange,
    _aten.arange.start_step: _arange,
}


def outlined(func: Any, on_host: bool, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the results of an operation on the meta device, with the layouts of a CPU if `on_host`.

    Operations without a rule here are torch's own on the meta device.
    """
    if "device" in options:
        options = {**options, "device": _META}
        options.pop("pin_memory", None)
    if func in _KEEP_DTYPE or func in _GIVE_FLOATS:
        return _elementwise(args, floats=func in _GIVE_FLOATS)
    if (rule := _RULES.get(func)) is not None:
        return rule(on_host, *args, **options)
    return func(*map(_on_meta, args), **options)
