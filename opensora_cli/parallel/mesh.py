"""The one owner of the groups of ranks: a mesh with an axis for each way in which work is divided."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from opensora_cli.core.exceptions import HardwareError

AXES = ("replicate", "shard", "guidance", "ring", "ulysses", "tensor")
"""Outermost first: ranks that exchange the most, those of `tensor`, are adjacent, and so on the same machine."""

_JOINT_AXES = (("replicate", "shard"), ("ring", "ulysses"))
"""Axes whose ranks also form a group: data-parallel and sequence-parallel ones."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """How many ranks lie along each axis of a mesh, each from 1."""

    replicate: int = 1
    """Data-parallel copies of the weights."""
    shard: int = 1
    """Data-parallel ranks between which the weights of a copy are divided."""
    guidance: int = 1
    """Ranks between which the branches of classifier-free guidance are divided."""
    ring: int = 1
    """Ranks of ring attention."""
    ulysses: int = 1
    """Ranks of Ulysses attention."""
    tensor: int = 1
    """Ranks between which the heads and features of each block are divided."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if min(astuple(self)) < 1:
            raise ValueError(f"every axis has at least one rank: {self}")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(astuple(self))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank lies along each axis, from 0; the last axis runs fastest."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found


class ParallelMesh:
    """The groups of ranks of a process, made once, by all ranks at the same time, after `dist.init_process_group`.

    Ranks are laid out in row-major order. The groups of every axis, of (replicate, shard) and of (ring, ulysses) are
    made here, in one order on all ranks. Raises ValueError if the number of ranks is not that of `shape`.
    """

    def __init__(self, shape: MeshShape, *, device_type: str) -> None:
        if dist.get_world_size() != shape.size:
            raise ValueError(f"{shape} has {shape.size} ranks, but there are {dist.get_world_size()}")
        self.shape = shape
        self._ranks = torch.arange(shape.size).view(astuple(shape))
        # Needs no other rank, and serves for all axes along which there is one rank.
        with libraries_on_stderr():
            alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {(): alone}
        for axes in (*((axis,) for axis in AXES), *_JOINT_AXES):
            self.group(*axes)
        self.device_mesh = DeviceMesh.from_group(
            [self.group(axis) for axis in AXES], device_type, mesh=self._ranks, mesh_dim_names=AXES
        )
        """The same as torch sees it, with all of `AXES`: `device_mesh["replicate", "shard"]` is what FSDP takes."""

    def coordinate(self, axis: str) -> int:
        """Return where this rank lies along `axis`, from 0."""
        return self.shape.coordinates(dist.get_rank())[axis]

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the group of those ranks that differ from this one along `axes` only, in the order of the mesh.

        `axes` are of `AXES`, in any order; none gives this rank alone. The first call for axes of which no group was
        made yet makes one, so all ranks must call it. Raises ValueError if there is no such axis.
        """
        unknown = set(axes) - set(AXES)
        if unknown:
            raise ValueError(f"{sorted(unknown)} are not axes of the mesh: use {AXES}")
        wanted = tuple(axis for axis in AXES if axis in axes and getattr(self.shape, axis) > 1)
        if wanted not in self._groups:
            self._groups[wanted] = self._make(wanted)
        return self._groups[wanted]

    def stages(self, axis: str, *, inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Make two groups along an axis: of `inner` ranks in a row, and of those with the same place in each such row.

        All ranks call it. `inner` divides the ranks of the axis.
        """
        lines = self._ranks.movedim(AXES.index(axis), -1).reshape(-1, getattr(self.shape, axis) // inner, inner)
        places = lines.transpose(1, 2).reshape(-1, lines.shape[1])
        return _own_group(lines.reshape(-1, inner).tolist()), _own_group(places.tolist())

    def _make(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        inner = [AXES.index(axis) for axis in axes]
        outer = [index for index in range(len(AXES)) if index not in inner]
        size = prod(getattr(self.shape, axis) for axis in axes)
        if size == self.shape.size:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        return _own_group(self._ranks.permute(*outer, *inner).reshape(-1, size).tolist())


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    own: dist.ProcessGroup | None = None
    for ranks in groups:
        group = new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    assert own is not None
    return own


def backend_of(device_type: str) -> str:
    """Return the backend for `dist.init_process_group`: gloo for CPUs, and NCCL beside it for GPUs.

    With both, each collective takes the one for the device of its tensor, so that small messages of the host need no
    GPU.
    """
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Make a group of `ranks`, numbered as they are given; all ranks of the run call it, in the same order.

    Raises HardwareError if they are given in another order than ascending, which torch 2.10 would make of it.
    """
    with libraries_on_stderr():
        if list(ranks) == sorted(ranks):
            group: dist.ProcessGroup = dist.new_group(list(ranks))
            return group
        try:
            group = dist.new_group(list(ranks), sort_ranks=False)
            return group
        except TypeError:
            raise HardwareError(
                f"torch {torch.__version__} has no groups in the order {list(ranks)}", hint="use torch 2.11 or later"
            ) from None


@contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Send what libraries write to stdout, where results go, to stderr: gloo in torch 2.10, NCCL if it is asked to."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:
        # It is closed.
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


_groups: dict[str, dist.ProcessGroup | None] = {}


def use_mesh(mesh: ParallelMesh | None) -> None:
    """Make the groups of `mesh` those that `get_data_parallel_group` and its like return; None forgets them."""
    _groups.clear()
    if mesh is not None:
        set_data_parallel_group(mesh.group("shard"), mesh.group("replicate", "shard"))
        set_sequence_parallel_group(mesh.group("ring", "ulysses"))
        set_tensor_parallel_group(mesh.group("tensor"))


def set_data_parallel_group(group: dist.ProcessGroup | None, mixed_group: dist.ProcessGroup | None = None) -> None:
    """Set the ranks that divide the weights, and all ranks that divide the data, which by default are the same."""
    _groups["data"] = group
    _groups["mixed"] = group if mixed_group is None else mixed_group


def get_data_parallel_group(get_mixed_dp_pg: bool = False) -> dist.ProcessGroup | None:
    """Return the data-parallel ranks that divide the weights of one copy between them (shard).

    `get_mixed_dp_pg` returns instead all ranks that divide the data, over which gradients are summed: those of all
    copies (replicate x shard). If no group was set it is all ranks: None in a single process.
    """
    return _groups.get("mixed" if get_mixed_dp_pg else "data", dist.group.WORLD)


def set_sequence_parallel_group(group: dist.ProcessGroup | None) -> None:
    """Set the ranks that divide the tokens of one sample between them (ring x ulysses)."""
    _groups["sequence"] = group


def get_sequence_parallel_group() -> dist.ProcessGroup | None:
    """Return the ranks that divide the tokens of one sample, None if they are not divided."""
    return _groups.get("sequence")


def set_tensor_parallel_group(group: dist.ProcessGroup | None) -> None:
    """Set the ranks that divide the heads and features of each block between them."""
    _groups["tensor"] = group


def get_tensor_parallel_group() -> dist.ProcessGroup | None:
    """Return the ranks that divide the heads and features of each block, None if they are not divided."""
    return _groups.get("tensor")
