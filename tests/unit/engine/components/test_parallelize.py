"""How ranks share a generation when no degree is set."""

import pytest

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.components.parallelize import choose_mesh
from opensora_cli.parallel.shares import MeshShape
from opensora_cli.settings.load import load_preset


def mesh(preset="256px", *, tokens=10_000, nodes=1, **parallel):
    if nodes > 1:
        parallel |= {"nnodes": nodes}
    settings = load_preset(preset, prompt="any").replace({f"parallel.{key}": value for key, value in parallel.items()})
    return choose_mesh(settings, video_tokens=tokens)


@pytest.mark.parametrize(
    ("gpus", "ulysses", "ring"),
    [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 1), (5, 5, 1), (6, 6, 1), (7, 1, 7), (8, 8, 1)],
)
def test_24_heads(gpus, ulysses, ring):
    assert mesh(gpus=gpus) == MeshShape(ring=ring, ulysses=ulysses)


@pytest.mark.parametrize(("gpus", "ulysses", "ring"), [(2, 2, 1), (3, 1, 3), (4, 4, 1), (6, 2, 3), (8, 4, 2)])
def test_4_heads(gpus, ulysses, ring):
    assert mesh("demo", tokens=80, gpus=gpus) == MeshShape(ring=ring, ulysses=ulysses)


def test_tokens_are_exchanged_within_a_machine_and_passed_round_between_them():
    assert mesh(gpus=8, nodes=2) == MeshShape(ring=2, ulysses=8)
    assert mesh(gpus=8, nodes=4) == MeshShape(ring=4, ulysses=8)


def test_the_nearest_ranks_are_those_of_tensor_parallelism():
    assert mesh(gpus=4, nodes=2, tensor_parallel_degree=2) == MeshShape(ring=2, ulysses=2, tensor=2)
    assert mesh(gpus=2, nodes=4, tensor_parallel_degree=4) == MeshShape(ring=2, tensor=4)
    assert mesh(gpus=3, nodes=2, tensor_parallel_degree=2) == MeshShape(ring=3, tensor=2)


def test_what_is_asked_for_is_done():
    assert mesh(gpus=8, ulysses_degree=2) == MeshShape(ulysses=2, ring=4)
    assert mesh(gpus=8, ring_degree=2) == MeshShape(ulysses=4, ring=2)
    assert mesh(gpus=8, tensor_parallel_degree=4) == MeshShape(ulysses=2, tensor=4)
    assert mesh(gpus=6, cfg_parallel_degree=2) == MeshShape(guidance=2, ulysses=3)
    assert mesh(gpus=4, ulysses_degree=2, ring_degree=1) == MeshShape(guidance=2, ulysses=2)


def test_nobody_is_left_without_work():
    with pytest.raises(RequestError, match="leave 4 of 8 devices without work"):
        mesh(gpus=8, ulysses_degree=2, ring_degree=1)
    with pytest.raises(RequestError, match="cannot share 80 tokens"):
        mesh("demo", tokens=80, gpus=81)
