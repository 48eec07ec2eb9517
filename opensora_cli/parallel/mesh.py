"""Owner of all process groups: a mesh with an axis for each division of work."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.parallel.shares import AXES, MeshShape

_JOINT_AXES = (("replicate", "shard"), ("ring", "ulysses"))
"""Pairs of axes whose ranks also form a group: data-parallel and sequence-parallel axes."""


class ParallelMesh:
    """Process groups of a rank. All ranks create them once, at the same time, after `dist.init_process_group`.

    Ranks are in row-major order. Raises ValueError if the number of ranks is not that of `shape`.
    """

    def __init__(self, shape: MeshShape, *, device_type: str) -> None:
        if dist.get_world_size() != shape.size:
            raise ValueError(f"{shape} has {shape.size} ranks, but there are {dist.get_world_size()}")
        self.shape = shape
        self._ranks = torch.arange(shape.size).view(astuple(shape))
        # This group needs no other rank, and serves for all axes with one rank.
        with libraries_on_stderr():
            alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {(): alone}
        for axes in (*((axis,) for axis in AXES), *_JOINT_AXES):
            self.group(*axes)
        self.device_mesh = DeviceMesh.from_group(
            [self.group(axis) for axis in AXES], device_type, mesh=self._ranks, mesh_dim_names=AXES
        )
        """Mesh as torch's `DeviceMesh` with all of `AXES`: `device_mesh["replicate", "shard"]` is for FSDP."""

    def coordinate(self, axis: str) -> int:
        return self.shape.coordinates(dist.get_rank())[axis]

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the group of ranks that differ from this one only along `axes`, in the order of the mesh.

        `axes` are from `AXES`, in any order; without axes, the group is this rank alone. The first call for new axes
        creates a group, so that all ranks must make it. Raises ValueError for an unknown axis.
        """
        if unknown := set(axes) - set(AXES):
            raise ValueError(f"{sorted(unknown)} are not axes of the mesh: use {AXES}")
        wanted = tuple(axis for axis in AXES if axis in axes and getattr(self.shape, axis) > 1)
        if wanted not in self._groups:
            inner = [AXES.index(axis) for axis in wanted]
            outer = [index for index in range(len(AXES)) if index not in inner]
            lines = self._ranks.permute(*outer, *inner).reshape(-1, prod(getattr(self.shape, axis) for axis in wanted))
            world = dist.group.WORLD if len(lines) == 1 else None
            self._groups[wanted] = world or _own_group(lines.tolist())
        return self._groups[wanted]

    def stages(self, axis: str, *, inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Create two groups along an axis: `inner` consecutive ranks, and the ranks with this place in each such part.

        All ranks must call this. `inner` must divide the number of ranks along the axis.
        """
        lines = self._ranks.movedim(AXES.index(axis), -1).reshape(-1, getattr(self.shape, axis)).tolist()
        parts = [line[start : start + inner] for line in lines for start in range(0, len(line), inner)]
        places = [line[place::inner] for line in lines for place in range(inner)]
        return _own_group(parts), _own_group(places)


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    own: dist.ProcessGroup | None = None
    for ranks in groups:
        group = new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    assert own is not None
    return own


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create a group of `ranks`, in the given order. All ranks of the run must call this in the same order.

    Raises HardwareError if the order is not ascending and torch 2.10 would sort the ranks.
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
    """Redirect stdout, which is for results, to stderr: gloo in torch 2.10, and NCCL if set, print there."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:
        # stdout is closed.
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
    """Set the groups of `mesh` for `get_data_parallel_group` and similar functions; None clears them."""
    _groups.clear()
    if mesh is not None:
        set_data_parallel_group(mesh.group("shard"), mesh.group("replicate", "shard"))
        set_sequence_parallel_group(mesh.group("ring", "ulysses"))
        set_tensor_parallel_group(mesh.group("tensor"))


def set_data_parallel_group(group: dist.ProcessGroup | None, mixed_group: dist.ProcessGroup | None = None) -> None:
    """Set the group that divides the weights, and the group that divides the data; by default they are the same."""
    _groups["data"] = group
    _groups["mixed"] = group if mixed_group is None else mixed_group


def set_sequence_parallel_group(group: dist.ProcessGroup | None) -> None:
    """Set the ranks that divide the tokens of one sample between them (ring x ulysses)."""
    _groups["sequence"] = group


def set_tensor_parallel_group(group: dist.ProcessGroup | None) -> None:
    """Set the ranks that divide the heads and features of each block between them."""
    _groups["tensor"] = group


def get_data_parallel_group(get_mixed_dp_pg: bool = False) -> dist.ProcessGroup | None:
    """Return the data-parallel ranks that divide the weights of one copy between them (shard).

    With `get_mixed_dp_pg`, return the ranks of all copies, which divide the data and sum gradients (replicate x shard).
    Without a set group, the result is the group of all ranks, or None in a single process.
    """
    return _groups.get("mixed" if get_mixed_dp_pg else "data", dist.group.WORLD)


def get_sequence_parallel_group() -> dist.ProcessGroup | None:
    """Return the ranks that divide the tokens of one sample, None if they are not divided."""
    return _groups.get("sequence")


def get_tensor_parallel_group() -> dist.ProcessGroup | None:
    """Return the ranks that divide the heads and features of each block, None if they are not divided."""
    return _groups.get("tensor")
