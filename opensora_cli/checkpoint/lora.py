"""Adapters, and merging them into and unmerging them from the weights they were trained for.

An adapter (Hu et al. 2021, LoRA) holds two small matrices A and B for each of its modules; the module computes with
W + scale · B·A. This module computes the sum once, in fp32, and rounds it once to the dtype of W.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.checkpoint.fp8 import FP8_DTYPES
from opensora_cli.checkpoint.lazy import LazyTensor, cast, rounded
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import first_few


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


def described_scales(updates: Iterable[LowRank]) -> str:
    """Return the lowest and the highest scale of updates: `alpha / rank 0.5 to 1`."""
    scales = [update.scale for update in updates]
    return "alpha / rank " + " to ".join(dict.fromkeys(f"{scale:g}" for scale in (min(scales), max(scales))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter; none of its tensors has been read."""

    path: Path
    files: tuple[Path, ...]
    """The files of the adapter."""
    metadata: Mapping[str, str]
    updates: Mapping[str, tuple[LowRank, ...]]
    """Updates by the names of the weights in the adapter's file."""
    replacements: Mapping[str, LazyTensor]
    """Tensors that were trained as a whole (`modules_to_save`, biases), by their names."""


def merge(
    entries: Mapping[str, LazyTensor], adapter: Adapter, *, scale: float = 1.0, subtract: bool = False
) -> dict[str, LazyTensor]:
    """Add an adapter's updates to the weights, and replace the tensors that it trained as a whole.

    Args:
        entries: the model's tensors, under the names they had in training.
        adapter: the adapter to merge.
        scale: factor of each update, besides the scale of the update itself.
        subtract: undo a merge with the same scale, up to rounding.

    Raises:
        RequestError: the adapter is to be subtracted, but it replaced tensors, whose original values are lost.
        CheckpointError: the adapter is for tensors that are missing, have other shapes, or are not floating point with
            at least 16 bits.
    """
    if subtract and adapter.replacements:
        raise RequestError(
            f"{adapter.path} cannot be unmerged: it replaced {first_few(list(adapter.replacements))}",
            hint="take these from the original checkpoint",
        )
    _check(entries, adapter)
    merged = dict(entries)
    for name, replacement in adapter.replacements.items():
        merged[name] = cast(replacement, entries[name].dtype, name=name)
    for name, updates in adapter.updates.items():
        merged[name] = _merged(merged[name], updates, scale=-scale if subtract else scale, name=name)
    return merged


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
