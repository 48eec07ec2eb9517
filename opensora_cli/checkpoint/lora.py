"""Adapters, and merging them into and unmerging them from the weights they were trained for.

An adapter (Hu et al. 2021, LoRA) holds two small matrices A and B for each of its modules; the module computes with
W + scale · B·A. This module computes the sum once, in fp32, and rounds it once to the dtype of W.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.checkpoint.fp8 import FP8_DTYPES
from opensora_cli.checkpoint.lazy import LazyTensor, rounded
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import first_few


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Low-rank update of one weight: scale · B·A, as a matrix of the weight's rows."""

    a: LazyTensor
    """Matrix A: (rank, in)."""
    b: LazyTensor
    """Matrix B: (out, rank)."""
    scale: float
    """Factor of B·A: alpha / rank, or alpha / sqrt(rank)."""

    @property
    def described(self) -> str:
        """The shapes of both matrices, for errors."""
        return f"A {list(self.a.shape)}, B {list(self.b.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter; none of its tensors has been read."""

    path: Path
    files: tuple[Path, ...]
    """The files of the adapter."""
    metadata: Mapping[str, str]
    updates: Mapping[str, tuple[LowRank, ...]]
    """Updates by the names of the weights in the adapter's file."""

    @property
    def scales(self) -> str:
        """The lowest and the highest scale of the updates: `alpha / rank 0.5 to 1`."""
        scales = [update.scale for updates in self.updates.values() for update in updates]
        return "alpha / rank " + " to ".join(dict.fromkeys(f"{scale:g}" for scale in (min(scales), max(scales))))


def require_fit(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], *, hint: str) -> None:
    """Raise CheckpointError, with `hint` for unknown names, unless each update fits a weight of these shapes."""
    unknown = [name for name in adapter.updates if name not in shapes]
    if unknown:
        raise CheckpointError(
            f"{adapter.path} is for {len(unknown)} weights that are not in the model: {first_few(unknown)}", hint=hint
        )
    misfits = [
        f"{name} {list(shapes[name])} (adapter: {update.described})"
        for name, updates in adapter.updates.items()
        for update in updates
        if shapes[name] != (update.b.shape[0], update.a.shape[1])
    ]
    if misfits:
        raise CheckpointError(f"{adapter.path} does not fit the model: {first_few(misfits)}")


def merge(entries: Mapping[str, LazyTensor], adapter: Adapter, *, scale: float = 1.0) -> dict[str, LazyTensor]:
    """Add an adapter's updates to the weights.

    Args:
        entries: the model's tensors, under the names they had in training.
        adapter: the adapter to merge.
        scale: factor of each update, besides the scale of the update itself. The negative one of a merge undoes it, up
            to rounding.

    Raises:
        CheckpointError: the adapter is for tensors that are missing, have other shapes, or are not floating point with
            at least 16 bits.
    """
    shapes = {name: entry.shape for name, entry in entries.items()}
    require_fit(
        adapter, shapes, hint="name the model's tensors as in its training: osora ckpt convert --rename OLD=NEW"
    )
    dtypes = {name: entries[name].dtype for name in adapter.updates}
    unfit = [name for name, dtype in dtypes.items() if not dtype.is_floating_point or dtype in FP8_DTYPES]
    if unfit:
        raise CheckpointError(
            f"an adapter cannot be merged into {str(dtypes[unfit[0]]).removeprefix('torch.')}: {first_few(unfit)}",
            hint="osora ckpt convert --dtype bf16 makes weights of 16 bits",
        )
    return {
        name: _merged(entry, adapter.updates[name], scale=scale, name=name) if name in adapter.updates else entry
        for name, entry in entries.items()
    }


def _merged(base: LazyTensor, updates: Sequence[LowRank], *, scale: float, name: str) -> LazyTensor:
    """Return the sum of a weight and its low-rank updates times `scale`."""

    def read() -> Tensor:
        weight = base.read()
        total = torch.zeros(base.shape, dtype=torch.promote_types(base.dtype, torch.float32))
        for update in updates:
            total += (update.b.read().to(total) @ update.a.read().to(total)).mul_(update.scale * scale)
        return rounded(total + weight, base.dtype, name=name)

    return LazyTensor(base.shape, base.dtype, read)
