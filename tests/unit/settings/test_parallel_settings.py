"""Settings of several devices: what contradicts itself is refused, and said how to mend."""

import pytest
from pydantic import ValidationError

from opensora_cli.settings.load import load_preset
from opensora_cli.settings.parallel import ParallelSettings


@pytest.mark.parametrize(
    ("given", "ranks", "world"),
    [
        ({}, 1, 1),
        ({"gpus": "8"}, 8, 8),
        ({"devices": "0,2"}, 2, 2),
        ({"gpus": 4, "nnodes": 2, "rdzv_endpoint": "node0:29500", "node_rank": 1}, 4, 8),
    ],
)
def test_ranks(given, ranks, world):
    settings = ParallelSettings.model_validate(given)
    assert (settings.ranks_per_node, settings.world_size) == (ranks, world)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpus": 0}, "greater than 0"),
        ({"gpus": 3, "devices": "0,2"}, "parallel.gpus=3 must be the number of parallel.devices, 2"),
        ({"devices": "1,1"}, "parallel.devices=1,1 names a card twice"),
        ({"nnodes": 2}, "parallel.nnodes=2 needs parallel.rdzv_endpoint"),
        ({"node_rank": 1}, "parallel.node_rank=1 must be below parallel.nnodes=1"),
        ({"rdzv_endpoint": "a:1"}, "parallel.rdzv_endpoint=a:1 has no effect on one machine"),
        ({"nnodes": 2, "rdzv_endpoint": "node0"}, "parallel.rdzv_endpoint=node0 must be HOST:PORT"),
        ({"nnodes": 2, "rdzv_endpoint": "node0:70000"}, "must be HOST:PORT"),
        ({"nnodes": 2, "rdzv_endpoint": "node0:" + 5000 * "1"}, "1 must be HOST:PORT, as in node0:29500"),
        ({"nnodes": 2, "rdzv_endpoint": "node0:\u0661\u0662"}, "must be HOST:PORT"),
        ({"devices": "0,x"}, "parallel.devices=0,x must be numbers of cards, as in 0,2"),
        ({"devices": "0,-1"}, "parallel.devices=0,-1 must be numbers of cards"),
        ({"devices": [0, "x"]}, "parallel.devices=0,x must be numbers of cards"),
        ({"gpus": 8, "ulysses_degree": 3}, "parallel.ulysses_degree=3 must divide the 8 devices"),
        (
            {"gpus": 6, "ulysses_degree": 2, "ring_degree": 2},
            "parallel.ulysses_degree=2 x parallel.ring_degree=2 must divide the 6 devices",
        ),
    ],
)
def test_contradictions(given, message):
    with pytest.raises(ValidationError, match=message.replace("(", r"\(")):
        ParallelSettings.model_validate(given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.gpus": 5, "parallel.tensor_parallel_degree": 5}, "must divide model.num_heads=4: use 1, 2 or 4"),
        ({"parallel.gpus": 8, "parallel.ulysses_degree": 8}, "must be at most the 4 heads"),
        ({"parallel.gpus": 2, "runtime.device": "cuda:1"}, "is one card"),
        ({"parallel.devices": "0,2", "runtime.device": "cpu"}, "both name devices"),
    ],
)
def test_contradictions_with_the_model_and_the_device(changes, message):
    with pytest.raises(ValidationError, match=message):
        load_preset("demo", prompt="any").replace(changes)
