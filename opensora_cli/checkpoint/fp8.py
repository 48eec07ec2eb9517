"""Weights in 8-bit floating point, each with a scale: weight = 8-bit values x scale.

This is about storage. Published files keep the scale of `x.weight` under one of these names:

- `x.weight_scale`: one number, or one for each row (compressed-tensors, ComfyUI);
- `x.scale_weight`: one number (older ComfyUI);
- `x.weight_scale_inv`: one for each block of 128 x 128 (DeepSeek-V3). Despite its name, it is multiplied.

8-bit tensors without a scale are used unchanged. Written files hold `x.weight` and `x.weight_scale`, one number.
"""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from opensora_cli.checkpoint.lazy import LazyTensor, rounded
from opensora_cli.core.exceptions import CheckpointError

FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})

_SCALE = "_scale"
_BLOCK = 128
# Scales of activations, and flags for programs that compute in 8 bits: they mean nothing beside other weights.
_COMPANIONS = ("input_scale", "scale_input", "comfy_quant")
_MARKER = "scaled_fp8"
# Not every 2-D weight is a linear layer: these are look-up tables.
_TABLES = ("*embed*", "shared.weight", "*.shared.weight", "*relative_attention_bias*")


def dequantize(entries: Mapping[str, LazyTensor], dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Multiply 8-bit tensors by their scales, in any of the variants above, and drop the scales.

    The product is rounded to `dtype` once; all other tensors pass unchanged. Raises CheckpointError if a tensor has two
    scales, or a scale whose shape or dtype fits none of the variants.
    """
    scales = _scales(entries)
    result: dict[str, LazyTensor] = {}
    for name, entry in without_scales(entries).items():
        if name not in scales:
            result[name] = entry
            continue
        if len(scales[name]) > 1:
            raise CheckpointError(f"{name} has more than one scale: {', '.join(scales[name])}")
        scale = entries[scales[name][0]] if scales[name] else None
        result[name] = _dequantized(name, entry, scale, dtype)
    return result


def without_scales(entries: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the weights of a model, without the scales and flags of 8-bit tensors."""
    scales = _scales(entries)
    left_out = {name for found in scales.values() for name in found}
    left_out |= {f"{name.rpartition('.')[0]}.{kind}".removeprefix(".") for name in scales for kind in _COMPANIONS}
    return {
        name: entry
        for name, entry in entries.items()
        if name not in left_out and not (_is_marker(name) and entry.dtype in FP8_DTYPES)
    }


def separated(before: Mapping[str, LazyTensor], after: Mapping[str, LazyTensor]) -> list[str]:
    """Return the names in `before` of the 8-bit tensors whose scale differs in `after`, which may rename entries."""
    new_names = {id(entry): name for name, entry in after.items()}
    scales, new_scales = _scales(before), _scales(after)
    return [
        name
        for name, found in scales.items()
        if (new_name := new_names.get(id(before[name]))) is not None
        and [before[scale] for scale in found] != [after[scale] for scale in new_scales.get(new_name, [])]
    ]


def quantize(entries: Mapping[str, LazyTensor], dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Quantize the weights of linear layers to `torch.float8_e4m3fn` or `float8_e5m2`, each with its scale.

    Names and shapes identify linear layers: floating point, two dimensions, and a name that ends in `weight` and is not
    the name of an embedding. All other tensors pass unchanged, 8-bit tensors included. Raises CheckpointError if the
    name of a scale is taken.
    """
    result: dict[str, LazyTensor] = {}
    for name, entry in entries.items():
        if not _is_linear_weight(name, entry):
            result[name] = entry
            continue
        if name + _SCALE in entries:
            raise CheckpointError(f"{name} cannot get a scale: there is a tensor {name + _SCALE} already")
        result[name], result[name + _SCALE] = _quantized(name, entry, dtype)
    return result


def _quantized(name: str, base: LazyTensor, dtype: torch.dtype) -> tuple[LazyTensor, LazyTensor]:
    """Return the tensor divided by its scale, rounded to nearest and clamped to 8 bits, and the scale."""
    found: list[Tensor] = []

    def scale() -> Tensor:
        if not found:
            found.append(_scale_of(name, base.read(), dtype))
        return found[0]

    def read() -> Tensor:
        largest = torch.finfo(dtype).max
        return (base.read().float() / scale()).clamp_(-largest, largest).to(dtype)

    return LazyTensor(base.shape, dtype, read), LazyTensor((), torch.float32, scale)


def _dequantized(name: str, base: LazyTensor, scale: LazyTensor | None, dtype: torch.dtype) -> LazyTensor:
    block_rows, block_columns = (1, 1) if scale is None else _block_of_scale(name, base, scale)

    def read() -> Tensor:
        values = _widened(base.read())
        if scale is not None:
            factors = scale.read().float()
            if factors.numel() > 1:
                factors = factors.view(factors.shape[0], -1).repeat_interleave(block_rows, 0)[: values.shape[0]]
                columns = math.prod(values.shape[1:])
                factors = factors.repeat_interleave(block_columns, 1)[:, :columns].view(values.shape)
            values *= factors.view(()) if factors.numel() == 1 else factors
        return rounded(values, dtype, name=name)

    return LazyTensor(base.shape, dtype, read)


def _scale_of(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale with which the largest magnitude becomes the largest 8-bit number: (), fp32.

    The scale is rounded to bfloat16, which is finer than any 8 bits. So dequantizing restores the magnitude exactly,
    and quantizing the bfloat16 product gives the same scale and the same 8-bit values again.
    """
    low, high = values.aminmax() if values.numel() else (torch.zeros(()), torch.zeros(()))
    # `maximum` keeps NaN.
    largest = torch.maximum(-low, high).float()
    if not largest.isfinite():
        raise CheckpointError(
            f"{name} has numbers that are not finite, which 8 bits cannot hold",
            hint="osora ckpt verify lists such tensors",
        )
    if not largest:
        return torch.ones(())
    largest = largest.bfloat16().float().clamp(max=torch.finfo(torch.bfloat16).max)
    # If the magnitude is so small that the division underflows, the smallest valid divisor is the scale.
    return (largest / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)


def _widened(values: Tensor) -> Tensor:
    """Return 8-bit values in fp32, by look-up: torch's own conversion takes four times as long on a CPU."""
    numbers = torch.arange(256, dtype=torch.uint8).view(values.dtype).float()
    return numbers.index_select(0, values.view(-1).view(torch.uint8).int()).view(values.shape)


def _scales(entries: Mapping[str, LazyTensor]) -> dict[str, list[str]]:
    """Return the 8-bit tensors, each with the candidates for its scale, rarely more than one."""
    found = {}
    for name, entry in entries.items():
        if entry.dtype in FP8_DTYPES and not _is_marker(name):
            module, _, kind = name.rpartition(".")
            candidates = (f"{name}{_SCALE}", f"{name}_scale_inv", f"{module}.scale_{kind}".removeprefix("."))
            found[name] = [candidate for candidate in candidates if candidate in entries]
    return found


def _is_marker(name: str) -> bool:
    """Return whether this is the tensor by which older ComfyUI recognizes 8-bit files."""
    return name.rpartition(".")[2] == _MARKER


def _block_of_scale(name: str, base: LazyTensor, scale: LazyTensor) -> tuple[int, int]:
    """Return how many rows and columns of `base` share one number of `scale`."""
    rows, columns = (base.shape[0] if base.shape else 1), math.prod(base.shape[1:])
    if scale.dtype.is_floating_point:
        if scale.numel == 1:
            return rows, columns
        if scale.shape[0] == scale.numel == rows:
            return 1, columns
        if len(base.shape) == 2 and scale.shape == (-(-rows // _BLOCK), -(-columns // _BLOCK)):
            return _BLOCK, _BLOCK
    raise CheckpointError(
        f"the scale of {name} {list(base.shape)} is {str(scale.dtype).removeprefix('torch.')} {list(scale.shape)}: "
        f"only one number, one a row, or one a block of {_BLOCK} x {_BLOCK} is understood"
    )


def _is_linear_weight(name: str, entry: LazyTensor) -> bool:
    return (
        name.rpartition(".")[2] == "weight"
        and len(entry.shape) == 2
        and entry.dtype.is_floating_point
        and entry.dtype not in FP8_DTYPES
        and not any(fnmatchcase(name, pattern) for pattern in _TABLES)
    )
