"""Settings of several devices: what contradicts itself is refused, with a hint how to fix it."""

import pytest
from pydantic import ValidationError

from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.devices import ParallelSettings
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import read_sections
from opensora_cli.settings.load import load_preset


@pytest.mark.parametrize(
    ("given", "ranks", "world"),
    [({}, 1, 1), ({"gpus": "8"}, 8, 8), ({"devices": "0,2"}, 2, 2), ({"gpus": 4, "nnodes": 2}, 4, 8)],
)
def test_ranks(given, ranks, world):
    settings = ParallelSettings.model_validate(given)
    assert (settings.ranks_per_node, settings.world_size) == (ranks, world)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpus": 0}, "greater than 0"),
        ({"gpus": 3, "devices": "0,2"}, "parallel.gpus=3 must be the number of parallel.devices, 2"),
        ({"devices": "1,1"}, "parallel.devices=1,1 names a GPU twice"),
        ({"devices": "0,x"}, "valid integer"),
        ({"devices": "0,-1"}, "greater than or equal to 0"),
        ({"gpus": 8, "ulysses_degree": 3}, "parallel.ulysses_degree=3 must divide the 8 devices"),
        ({"gpus": 6, "ulysses_degree": 2, "ring_degree": 2}, "parallel.ulysses_degree=2 x parallel.ring_degree=2"),
    ],
)
def test_contradictions(given, message):
    with pytest.raises(ValidationError, match=message.replace("(", r"\(")):
        ParallelSettings.model_validate(given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.gpus": 5, "parallel.tensor_parallel_degree": 5}, "must divide model.num_heads=4: use 1, 2 or 4"),
        (
            {"compile": "true", "parallel.gpus": 2, "parallel.tensor_parallel_degree": 2},
            "compile=true does not go with parallel.tensor_parallel_degree=2",
        ),
        ({"parallel.gpus": 8, "parallel.ulysses_degree": 8}, "must be at most the 4 heads"),
        ({"parallel.gpus": 2, "runtime.device": "cuda:1"}, "is one GPU"),
    ],
)
def test_contradictions_with_the_model_and_the_device(changes, message):
    with pytest.raises(ValidationError, match=message):
        load_preset("demo", prompt="any").replace(changes)


def test_saved_settings_of_earlier_versions_are_read():
    saved: dict[str, object] = {"prompt": "any", "parallel": {"gpus": 2, "node_rank": 0, "rdzv_endpoint": None}}
    saved["sampling"] = {"seed": 3, "batch_size": 4}
    layer = read_sections(GenerateSettings, saved, source="s.json", is_saved=True)
    assert layer.keys() == {"prompt", "parallel.gpus", "sampling.seed"}
    with pytest.raises(RequestError, match=r"parallel\.node_rank \(from a\.yaml\) was removed"):
        read_sections(GenerateSettings, saved, source="a.yaml")
