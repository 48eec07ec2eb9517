"""Groups of a mesh over real processes."""

from dataclasses import asdict

import torch
import torch.distributed as dist

from opensora_cli.parallel.mesh import (
    ParallelMesh,
    get_data_parallel_group,
    get_sequence_parallel_group,
    get_tensor_parallel_group,
    use_mesh,
)
from opensora_cli.parallel.shares import AXES, MeshShape


def _members(group: dist.ProcessGroup | None) -> list[int]:
    assert group is not None
    ranks = [torch.empty((), dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(ranks, torch.tensor(dist.get_rank()), group=group)
    return [int(rank) for rank in ranks]


def _describe(sizes: dict[str, int], *wanted: tuple[str, ...]) -> tuple[list[int], list[list[int]], dict[str, int]]:
    mesh = ParallelMesh(MeshShape(**sizes), device_type="cpu")
    places = [mesh.coordinate(axis) for axis in AXES]
    torch_mesh = mesh.device_mesh
    assert torch_mesh.mesh_dim_names == AXES
    assert [torch_mesh.get_local_rank(axis) for axis in AXES] == places
    assert [torch_mesh[axis].get_group() for axis in AXES] == [mesh.group(axis) for axis in AXES]
    assert torch_mesh["replicate", "shard"].size() == mesh.shape.replicate * mesh.shape.shard
    return places, [_members(mesh.group(*axes)) for axes in wanted], asdict(mesh.shape)


def _named() -> dict[str, list[int]]:
    use_mesh(ParallelMesh(MeshShape(replicate=2, shard=2), device_type="cpu"))
    first = [_members(get_data_parallel_group()), _members(get_data_parallel_group(get_mixed_dp_pg=True))]
    use_mesh(ParallelMesh(MeshShape(ring=2, tensor=2), device_type="cpu"))
    second = [_members(get_sequence_parallel_group()), _members(get_tensor_parallel_group())]
    use_mesh(None)
    assert get_sequence_parallel_group() is get_tensor_parallel_group() is None
    groups = (*first, *second, _members(get_data_parallel_group()))
    return dict(zip(("data", "mixed", "sequence", "tensor", "unset"), groups, strict=True))


def test_four_ranks(pool):
    wanted = (("ring",), ("ulysses",), ("ulysses", "ring"), ("shard",))
    answers = pool(4).run(_describe, {"ring": 2, "ulysses": 2}, *wanted)
    for rank, (places, groups, _) in enumerate(answers):
        ring, ulysses = divmod(rank, 2)
        assert places == [0, 0, 0, ring, ulysses, 0]
        assert groups == [[ulysses, ulysses + 2], [2 * ring, 2 * ring + 1], [0, 1, 2, 3], [rank]]


def test_the_names_of_the_community(pool):
    for rank, groups in enumerate(pool(4).run(_named)):
        column, row = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        everyone = [0, 1, 2, 3]
        assert groups == {"data": row, "mixed": everyone, "sequence": column, "tensor": row, "unset": everyone}
