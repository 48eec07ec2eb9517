"""Changes to a checkpoint before it is read: other names, fewer tensors, another dtype, no 8-bit values.

Each function takes tensors by name and returns tensors by name, in the same order.

8-bit values are weights divided by a scale. Published files keep the scale of `x.weight` under one of these names:

- `x.weight_scale`: one number, or one for each row (compressed-tensors, ComfyUI);
- `x.scale_weight`: one number (older ComfyUI);
- `x.weight_scale_inv`: one for each block (DeepSeek-V3), which is refused.

8-bit tensors without a scale are used unchanged.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from opensora_cli.checkpoint.lazy import LazyTensor, rounded
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import plain

FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})

# Scales of activations, and flags for programs that compute in 8 bits: they mean nothing beside other weights.
_COMPANIONS = ("input_scale", "scale_input", "comfy_quant")
_MARKER = "scaled_fp8"
"""Tensor by which older ComfyUI recognizes 8-bit files."""


def rename(entries: Mapping[str, LazyTensor], rules: Sequence[str]) -> dict[str, LazyTensor]:
    """Give tensors other names.

    Args:
        entries: the tensors.
        rules: applied in order. `OLD=NEW` replaces the start of names that begin with OLD. An empty NEW removes a
            prefix; an empty OLD adds one to every name. The last `=` separates the two sides.

    Raises:
        RequestError: a rule is malformed, matches nothing, or gives two tensors one name or a tensor an empty name.
    """
    for rule in rules:
        old, equals, new = rule.rpartition("=")
        if not equals:
            raise RequestError(f"rename={rule!r} must be OLD=NEW")
        if not any(name.startswith(old) for name in entries):
            raise RequestError(f"rename={rule!r} matches no tensor{_such_as(entries)}")
        renamed: dict[str, LazyTensor] = {}
        for name, entry in entries.items():
            new_name = new + name[len(old) :] if name.startswith(old) else name
            if not new_name:
                raise RequestError(f"rename={rule!r} leaves nothing of the name {plain(name)}")
            if new_name in renamed:
                raise RequestError(f"rename={rule!r} gives two tensors the same name: {plain(new_name)}")
            renamed[new_name] = entry
        entries = renamed
    return dict(entries)


def drop(entries: Mapping[str, LazyTensor], patterns: Sequence[str]) -> dict[str, LazyTensor]:
    """Drop the tensors whose names match one of the shell-style `patterns`, such as `double_blocks.*.bias`.

    Raises RequestError if a pattern matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in entries):
            raise RequestError(f"drop={pattern!r} matches no tensor{_such_as(entries)}")
    return {name: entry for name, entry in entries.items() if not any(fnmatchcase(name, each) for each in patterns)}


def _such_as(entries: Mapping[str, LazyTensor]) -> str:
    return f"; there is, for example, {plain(next(iter(entries)))}" if entries else "; there are none"


def cast(entries: Mapping[str, LazyTensor], dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Cast all floating point tensors to another dtype, rounded as torch does; integers and booleans keep theirs.

    Reading raises the CheckpointError of `rounded`. 8-bit tensors must have been multiplied by their scales before; see
    `dequantize`.
    """
    return {
        name: _cast(name, entry, dtype) if entry.dtype.is_floating_point and entry.dtype != dtype else entry
        for name, entry in entries.items()
    }


def _cast(name: str, entry: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    return LazyTensor(entry.shape, dtype, lambda: rounded(entry.read(), dtype, name=name))


def dequantize(entries: Mapping[str, LazyTensor], dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Multiply 8-bit tensors by their scales, and drop the scales.

    The product is rounded to `dtype` once; all other tensors pass unchanged. Raises CheckpointError if a tensor has two
    scales, or a scale that is neither one number nor one a row.
    """
    scales = _scales(entries)
    result: dict[str, LazyTensor] = {}
    for name, entry in without_scales(entries).items():
        found = scales.get(name)
        if found is not None and len(found) > 1:
            raise CheckpointError(f"{name} has more than one scale: {', '.join(found)}")
        scale = entries[found[0]] if found else None
        result[name] = entry if found is None else _dequantized(name, entry, scale, dtype)
    return result


def _dequantized(name: str, base: LazyTensor, scale: LazyTensor | None, dtype: torch.dtype) -> LazyTensor:
    rows = base.shape[0] if base.shape else 1
    is_known = scale is None or scale.numel == 1 or scale.shape[0] == scale.numel == rows
    if scale is not None and not (is_known and scale.dtype.is_floating_point):
        raise CheckpointError(
            f"the scale of {name} {list(base.shape)} is {str(scale.dtype).removeprefix('torch.')} "
            f"{list(scale.shape)}: only one number, or one a row, is understood"
        )

    def read() -> Tensor:
        values = _widened(base.read())
        if scale is not None:
            factors = scale.read().float()
            values *= factors.view(()) if scale.numel == 1 else factors.view(rows, *[1] * (values.ndim - 1))
        return rounded(values, dtype, name=name)

    return LazyTensor(base.shape, dtype, read)


def _widened(values: Tensor) -> Tensor:
    """Return 8-bit values in fp32, by look-up: torch's own conversion takes four times as long on a CPU."""
    numbers = torch.arange(256, dtype=torch.uint8).view(values.dtype).float()
    return numbers.index_select(0, values.view(-1).view(torch.uint8).int()).view(values.shape)


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


def _scales(entries: Mapping[str, LazyTensor]) -> dict[str, list[str]]:
    """Return the 8-bit tensors, each with the candidates for its scale, rarely more than one."""
    found = {}
    for name, entry in entries.items():
        if entry.dtype in FP8_DTYPES and not _is_marker(name):
            module, _, kind = name.rpartition(".")
            candidates = (f"{name}_scale", f"{name}_scale_inv", f"{module}.scale_{kind}".removeprefix("."))
            found[name] = [candidate for candidate in candidates if candidate in entries]
    return found


def _is_marker(name: str) -> bool:
    return name.rpartition(".")[2] == _MARKER
