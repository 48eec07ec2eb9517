"""Weights in 8-bit floating point, each with a scale: weight = 8-bit values x scale.

This is about storage. Files in the wild keep the scale of `x.weight` under one of these names:

- `x.weight_scale`: one number, or one for each row (compressed-tensors, ComfyUI);
- `x.scale_weight`: one number (older ComfyUI);
- `x.weight_scale_inv`: one for each block of 128 x 128 (DeepSeek-V3). The name notwithstanding, it is multiplied.

8-bit tensors without any are taken as they are. What is written is `x.weight` and `x.weight_scale`, one number.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from opensora_cli.checkpoint.stream import Entry
from opensora_cli.checkpoint.views import ComputedEntry, rounded
from opensora_cli.core.exceptions import CheckpointError

FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})

_SCALE = "_scale"
_BLOCK = 128
# Scales of activations, and notes to programs that compute in 8 bits: they mean nothing beside other weights.
_COMPANIONS = ("input_scale", "scale_input", "comfy_quant")
_MARKER = "scaled_fp8"
# Two dimensions do not make a linear layer: these are tables, from which rows are looked up.
_TABLES = ("*embed*", "shared.weight", "*.shared.weight", "*relative_attention_bias*")


def dequantise(entries: Mapping[str, Entry], dtype: torch.dtype) -> dict[str, Entry]:
    """Multiply 8-bit tensors with their scales, and leave these out; all other tensors pass unchanged.

    Args:
        entries: the tensors, in any of the variants above.
        dtype: of what was 8-bit; the product is rounded to it once.

    Raises:
        CheckpointError: a tensor has two scales, or one whose shape or dtype is none of the variants.
    """
    scales = _scales(entries)
    result: dict[str, Entry] = {}
    for name, entry in without_scales(entries).items():
        if name not in scales:
            result[name] = entry
            continue
        if len(scales[name]) > 1:
            raise CheckpointError(f"{name} has more than one scale: {', '.join(scales[name])}")
        scale = entries[scales[name][0]] if scales[name] else None
        result[name] = DequantisedEntry(name, entry, scale, dtype)
    return result


def without_scales(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the tensors under whose names a model has its weights: all but scales, and notes beside 8-bit tensors."""
    scales = _scales(entries)
    left_out = {name for found in scales.values() for name in found} | _companions(scales)
    return {
        name: entry
        for name, entry in entries.items()
        if name not in left_out and not (_is_marker(name) and entry.dtype in FP8_DTYPES)
    }


def separated(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> list[str]:
    """Return the names in `before` of the 8-bit tensors whose scale is another in `after`, which has some of the same
    entries by the same or other names.
    """
    new_names = {id(entry): name for name, entry in after.items()}
    scales, new_scales = _scales(before), _scales(after)
    return [
        name
        for name, found in scales.items()
        if (new_name := new_names.get(id(before[name]))) is not None
        and [before[scale] for scale in found] != [after[scale] for scale in new_scales.get(new_name, [])]
    ]


def quantise(entries: Mapping[str, Entry], dtype: torch.dtype) -> dict[str, Entry]:
    """Give the weights of linear layers 8 bits, and put the scale of each behind it.

    Linear layers are known by names and shapes: floating point, two dimensions, a name that ends in `weight` and is not
    that of an embedding. All other tensors pass unchanged, and so do those that have 8 bits already.

    Args:
        entries: the tensors.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.

    Raises:
        CheckpointError: the name of a scale is taken.
    """
    result: dict[str, Entry] = {}
    for name, entry in entries.items():
        if not _is_linear_weight(name, entry):
            result[name] = entry
            continue
        if name + _SCALE in entries:
            raise CheckpointError(f"{name} cannot get a scale: there is a tensor {name + _SCALE} already")
        scale = ScaleEntry(name, entry, dtype)
        result[name] = QuantisedEntry(entry, scale, dtype)
        result[name + _SCALE] = scale
    return result


class DequantisedEntry(ComputedEntry):
    """The product of 8-bit values and their scale, if they have one: one number, one for each row, or one for each
    block of 128 x 128.
    """

    def __init__(self, name: str, base: Entry, scale: Entry | None, dtype: torch.dtype) -> None:
        super().__init__(base.shape, dtype)
        self._name = name
        self._base = base
        self._scale = scale
        self._block = (1, 1) if scale is None else _block_of_scale(name, base, scale)

    def compute(self, start: int, stop: int) -> Tensor:
        values = _widened(self._base.elements(start, stop))
        if self._scale is not None:
            values *= self._factors(self._scale.read().float(), start, stop)
        return rounded(values, self.dtype, name=self._name)

    def _factors(self, scale: Tensor, start: int, stop: int) -> Tensor:
        """Return the scale of each element, or the one of them all."""
        if scale.numel() == 1:
            return scale.reshape(1)
        block_rows, block_columns = self._block
        columns = self.row_numel
        first, last = start // columns, -(-stop // columns)
        by_row = scale.reshape(scale.shape[0], -1)[torch.arange(first, last) // block_rows]
        factors = by_row[:, :, None].expand(-1, -1, block_columns).flatten(1)[:, :columns].reshape(-1)
        return factors[start - first * columns : stop - first * columns]


class ScaleEntry(Entry):
    """The scale with which a tensor's largest magnitude becomes the largest 8-bit number: (), fp32.

    The magnitude is found when the scale is first read, by reading the whole tensor piece by piece. It is rounded
    to bfloat16, which is finer than any 8 bits: it then comes back exactly, and quantising what came back in bfloat16
    gives the same scale and the same 8-bit values again.
    """

    def __init__(self, name: str, base: Entry, dtype: torch.dtype) -> None:
        super().__init__((), torch.float32)
        self._name = name
        self._base = base
        self._largest = torch.finfo(dtype).max
        self._value: Tensor | None = None

    def elements(self, start: int, stop: int) -> Tensor:
        if self._value is None:
            self._value = self._find()
        return self._value[start:stop]

    def _find(self) -> Tensor:
        largest = torch.zeros(1)
        for piece in self._base.pieces():
            low, high = piece.aminmax()
            # `maximum` keeps NaN.
            largest = torch.maximum(largest, torch.maximum(-low, high).float())
        if not largest.isfinite().all():
            raise CheckpointError(
                f"{self._name} has numbers that are not finite, which 8 bits cannot hold",
                hint="osora ckpt inspect --stats lists such tensors",
            )
        if not largest.any():
            return torch.ones(1)
        rounded = largest.bfloat16().float().clamp(max=torch.finfo(torch.bfloat16).max)
        # A magnitude so small that the division underflows gets the smallest scale by which one can divide.
        return (rounded / self._largest).clamp(min=torch.finfo(torch.float32).tiny)


class QuantisedEntry(ComputedEntry):
    """A tensor over its scale in 8 bits: rounded to the nearest, and never over the largest number."""

    def __init__(self, base: Entry, scale: ScaleEntry, dtype: torch.dtype) -> None:
        super().__init__(base.shape, dtype)
        self._base = base
        self._scale = scale

    def compute(self, start: int, stop: int) -> Tensor:
        values = self._base.elements(start, stop).float() / self._scale.read()
        largest = torch.finfo(self.dtype).max
        return values.clamp_(-largest, largest).to(self.dtype)


def _widened(values: Tensor) -> Tensor:
    """Return 8-bit values in fp32: a look-up, as torch's own conversion takes four times as long on a CPU."""
    numbers = torch.arange(256, dtype=torch.uint8).view(values.dtype).float()
    return numbers.index_select(0, values.view(torch.uint8).int())


def _scales(entries: Mapping[str, Entry]) -> dict[str, list[str]]:
    """Return the 8-bit tensors, each with the tensors that may be its scale: hardly ever more than one."""
    quantised = (name for name, entry in entries.items() if entry.dtype in FP8_DTYPES and not _is_marker(name))
    return {name: _find_scales(name, entries) for name in quantised}


def _find_scales(name: str, entries: Mapping[str, Entry]) -> list[str]:
    module, _, kind = name.rpartition(".")
    candidates = [f"{name}{_SCALE}", f"{name}_scale_inv", f"{module}.scale_{kind}" if module else f"scale_{kind}"]
    return [candidate for candidate in candidates if candidate in entries]


def _companions(quantised: Iterable[str]) -> set[str]:
    modules = {name.rpartition(".")[0] for name in quantised}
    return {f"{module}.{kind}" if module else kind for module in modules for kind in _COMPANIONS}


def _is_marker(name: str) -> bool:
    """Whether it is the tensor by which older ComfyUI recognises 8-bit files."""
    return name.rpartition(".")[2] == _MARKER


def _block_of_scale(name: str, base: Entry, scale: Entry) -> tuple[int, int]:
    """Return how many rows and columns of `base` have one number of `scale` in common."""
    rows, columns = (base.shape[0] if base.shape else 1), base.row_numel
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


def _is_linear_weight(name: str, entry: Entry) -> bool:
    return (
        name.rpartition(".")[2] == "weight"
        and len(entry.shape) == 2
        and entry.dtype.is_floating_point
        and entry.dtype not in FP8_DTYPES
        and not any(fnmatchcase(name, pattern) for pattern in _TABLES)
    )
