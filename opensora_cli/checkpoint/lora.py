"""Adapters, and merging them into and unmerging them from the weights they were trained for.

An adapter (Hu et al. 2021, LoRA) holds two small matrices A and B for each of its modules; the module computes with
W + scale · B·A. This module computes the sum once, in fp32, and rounds it once to the dtype of W.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.checkpoint.fp8 import FP8_DTYPES
from opensora_cli.checkpoint.lazy import LazyTensor, cast, rounded
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import first_few

# A 16-bit sum is rounded twice; the rounding to fp32 is at most 2^-13 of the other.
_FP32_SHARE = 2.0**-12


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Low-rank update of one weight: scale · B·A, as a matrix of the weight's rows."""

    a: LazyTensor
    """Matrix A: (rank, in), or (rank, in, ...) for a convolution."""
    b: LazyTensor
    """Matrix B: (out, rank), or (out, rank, 1, ...) for a convolution."""
    scale: float
    """Factor of B·A: alpha / rank, or alpha / sqrt(rank)."""
    transposed: bool
    """Whether the weight is (in, out), as in an embedding."""

    @property
    def described(self) -> str:
        """The shapes of both matrices, for errors."""
        return f"A {list(self.a.shape)}, B {list(self.b.shape)}"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether the update can be added to a weight of this shape."""
        rank = self.a.shape[0]
        if self.transposed:
            return len(shape) == 2 and self.a.shape == (rank, shape[0]) and self.b.shape == (shape[1], rank)
        kernel = (1,) * (len(shape) - 2)
        return len(shape) >= 2 and self.a.shape == (rank, *shape[1:]) and self.b.shape == (shape[0], rank, *kernel)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Compute B·A as a matrix of the weight's rows, without the scale."""
        a, b = self.a.read().to(dtype).flatten(1), self.b.read().to(dtype).flatten(1)
        return a.T @ b.T if self.transposed else b @ a


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter; none of its tensors has been read."""

    path: Path
    files: tuple[Path, ...]
    """The files of the adapter."""
    style: str
    """Naming style of the tensors: PEFT, diffusers, ComfyUI or kohya."""
    metadata: Mapping[str, str]
    updates: Mapping[str, tuple[LowRank, ...]]
    """Updates by the names of the weights in the adapter's file."""
    replacements: Mapping[str, LazyTensor]
    """Tensors that were trained as a whole (`modules_to_save`, biases), by their names."""


def merge(entries: Mapping[str, LazyTensor], adapter: Adapter, *, scale: float = 1.0) -> dict[str, LazyTensor]:
    """Add an adapter's updates to the weights, and replace the tensors that it trained as a whole.

    Args:
        entries: the model's tensors, under the names they had in training.
        adapter: the adapter to merge.
        scale: factor of each update, besides the scale of the update itself.

    Raises:
        CheckpointError: the adapter is for tensors that are missing, have other shapes, or are not floating point with
            at least 16 bits.
    """
    _check(entries, adapter)
    merged = dict(entries)
    for name, replacement in adapter.replacements.items():
        merged[name] = cast(replacement, entries[name].dtype, name=name)
    for name, updates in adapter.updates.items():
        merged[name] = _merged(merged[name], updates, scale=scale, name=name)
    return merged


def unmerge(entries: Mapping[str, LazyTensor], adapter: Adapter, *, scale: float = 1.0) -> dict[str, LazyTensor]:
    """Subtract an adapter that `merge` has added with the same scale, up to rounding; see `unmerge_error`.

    Raises:
        RequestError: the adapter replaced tensors, whose original values are lost.
        CheckpointError: the adapter does not fit, as for `merge`.
    """
    if adapter.replacements:
        raise RequestError(
            f"{adapter.path} cannot be unmerged: it replaced {first_few(list(adapter.replacements))}",
            hint="take these from the original checkpoint",
        )
    return merge(entries, adapter, scale=-scale)


def unmerge_error(
    entries: Mapping[str, LazyTensor],
    adapter: Adapter,
    *,
    scale: float = 1.0,
    advance: Callable[[int], None] | None = None,
) -> tuple[float, str]:
    """Return an upper bound of the error of any weight after `unmerge`, and the tensor that has it.

    Merging rounded each sum to the nearest number of the dtype, and unmerging rounds each difference. So the error is
    at most half the spacing of floating point numbers at the sum, plus half the spacing at the difference.

    Args:
        entries, adapter, scale: the arguments of `unmerge`.
        advance: called with the bytes of the weights as they are read.

    Raises:
        RequestError, CheckpointError: for the reasons of `unmerge`.
    """
    unmerged = unmerge(entries, adapter, scale=scale)
    worst = (0.0, "")
    for name in adapter.updates:
        before, after = entries[name], unmerged[name]
        largest = [_magnitude(tensor.read()) for tensor in (before, after)]
        if advance is not None:
            advance(before.nbytes)
        bound = sum(_spacing(magnitude, before.dtype) / 2 for magnitude in largest) * (1 + _FP32_SHARE)
        if bound > worst[0] or not worst[1]:
            worst = (bound, name)
    return worst


def _merged(base: LazyTensor, updates: Sequence[LowRank], *, scale: float, name: str) -> LazyTensor:
    """Return the sum of a weight and its low-rank updates times `scale`."""

    def read() -> Tensor:
        dtype = torch.promote_types(base.dtype, torch.float32)
        total, *others = (update.matrix(dtype).mul_(update.scale * scale) for update in updates)
        for other in others:
            total += other
        return rounded(total.view(base.shape) + base.read(), base.dtype, name=name)

    return LazyTensor(base.shape, base.dtype, read)


def _check(entries: Mapping[str, LazyTensor], adapter: Adapter) -> None:
    names = [*adapter.updates, *adapter.replacements]
    unmatched = [name for name in names if name not in entries]
    if unmatched:
        raise CheckpointError(
            f"{adapter.path} is for {len(unmatched)} tensors that are not in the model: {first_few(unmatched)}",
            hint="name the model's tensors as in its training: osora ckpt convert --rename OLD=NEW",
        )
    misfits = [
        f"{name} {list(entries[name].shape)} (adapter: {update.described})"
        for name, updates in adapter.updates.items()
        for update in updates
        if not update.fits(entries[name].shape)
    ]
    misfits += [
        f"{name} {list(entries[name].shape)} (adapter: {list(replacement.shape)})"
        for name, replacement in adapter.replacements.items()
        if replacement.shape != entries[name].shape
    ]
    if misfits:
        raise CheckpointError(f"{adapter.path} does not fit the model: {first_few(misfits)}")
    dtypes = {name: entries[name].dtype for name in names}
    unfit = [name for name, dtype in dtypes.items() if not dtype.is_floating_point or dtype in FP8_DTYPES]
    if unfit:
        raise CheckpointError(
            f"an adapter cannot be merged into {str(dtypes[unfit[0]]).removeprefix('torch.')}: {first_few(unfit)}",
            hint="osora ckpt convert --dtype bf16 makes weights of 16 bits",
        )


def _magnitude(values: Tensor) -> float:
    if not values.numel():
        return 0.0
    low, high = values.aminmax()
    largest = max(-low.item(), high.item())
    # Comparisons with NaN are false, so a plain maximum would lose it.
    return math.inf if math.isnan(largest) else largest


def _spacing(magnitude: float, dtype: torch.dtype) -> float:
    """Return the distance from a number of `dtype` to the next larger one."""
    if math.isinf(magnitude):
        return math.inf
    info = torch.finfo(dtype)
    return math.ldexp(info.eps, math.frexp(max(magnitude, info.smallest_normal))[1] - 1)
