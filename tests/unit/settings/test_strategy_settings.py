"""Settings of training on several devices: what each strategy means, and what does not go together."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.settings.devices import Strategy, TrainParallelSettings
from opensora_cli.settings.explain import explain
from opensora_cli.settings.train import TrainSettings

MODEL = {"hidden_size": 64, "num_heads": 4, "axes_dim": "4,6,6"}
ULYSSES = {"gpus": 4, "ulysses_degree": 4}
T2V = {mode: float(mode == "t2v") for mode in CONDITION_MODES}


def _problems(strategy: str, parallel: dict[str, int], **changes: object) -> list[str]:
    """Return the broken rules of a training run in fp32, with `changes` by section."""
    values = {
        "target": "mmdit",
        "strategy": strategy,
        "parallel": parallel,
        "model": MODEL,
        "train_mmdit": {"mode_weights": T2V},
        "precision": {"compute": "fp32"},
        "init": "demo",
        **changes,
    }
    try:
        TrainSettings.model_validate(values)
    except ValidationError as error:
        return explain(error)
    return []


@pytest.mark.parametrize(
    ("strategy", "given", "axes"),
    [
        ("zero3", {}, (1, 1, 1, 1, 1)),
        ("ddp", {"gpus": "8"}, (8, 1, 1, 1, 1)),
        ("ddp", {"gpus": 8, "dp_replicate_degree": 8}, (8, 1, 1, 1, 1)),
        ("zero2", {"gpus": 8}, (1, 8, 1, 1, 1)),
        ("zero2", {"gpus": 8, "nnodes": 2, "dp_shard_degree": 8}, (2, 8, 1, 1, 1)),
        ("zero3", {"gpus": 8, "dp_replicate_degree": 2}, (2, 4, 1, 1, 1)),
        ("zero1", {"gpus": 8, "dp_replicate_degree": 2, "dp_shard_degree": 4}, (2, 4, 1, 1, 1)),
        ("hybrid", {"gpus": 8, "tensor_parallel_degree": 4}, (1, 2, 1, 1, 4)),
        ("hybrid", {"gpus": 8, "ulysses_degree": 2, "ring_degree": 2, "dp_shard_degree": 1}, (2, 1, 2, 2, 1)),
        ("hybrid", {"gpus": 8, "ulysses_degree": 2, "tensor_parallel_degree": 2}, (1, 2, 1, 2, 2)),
    ],
)
def test_axes_of_the_mesh(strategy: str, given: dict[str, int], axes: tuple[int, ...]) -> None:
    parallel = TrainParallelSettings.model_validate(given)
    names = ("replicate", "shard", "ring", "ulysses", "tensor")
    assert parallel.axes(Strategy(strategy)) == dict(zip(names, axes, strict=True))
    assert parallel.data_ranks(Strategy(strategy)) == axes[0] * axes[1]
    assert _problems(strategy, given) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpus": 8, "dp_replicate_degree": 2, "dp_shard_degree": 2}, "parallel.dp_replicate_degree=2 x"),
        ({"gpus": 8, "dp_shard_degree": 3}, "parallel.dp_shard_degree=3 must divide the 8 devices"),
        ({"gpus": 8, "sp_size": 2}, "Extra inputs are not permitted"),
        ({"gpus": 4, "ulysses_degree": 8}, "parallel.ulysses_degree=8 must divide the 4 devices"),
    ],
)
def test_degrees_that_contradict_each_other(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        TrainParallelSettings.model_validate(given)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("strategy", "parallel", "problem"),
    [
        ("hybrid", {"gpus": 4}, "strategy=hybrid needs one of ulysses_degree, .* over 1: set it, or use zero3"),
        ("ddp", {"gpus": 4, "dp_replicate_degree": 2}, "_degree=2 must be .* strategy=ddp: drop it, or use 4"),
        ("hybrid", {"gpus": 8, "tensor_parallel_degree": 8}, "_degree=8 must be at most model.num_heads=4"),
        ("hybrid", {"gpus": 8, "tensor_parallel_degree": 2, "ulysses_degree": 4}, "the 2 heads of a device: use"),
        ("hybrid", {**ULYSSES, "compression": "fp8"}, "compression=fp8 would round gradients by up to 1/16"),
        ("hybrid", {**ULYSSES, "all_to_all": "hierarchical"}, "ulysses_degree=4 into equal parts of 4 devices: use"),
    ],
)
def test_broken_rules(strategy: str, parallel: dict[str, Any], problem: str) -> None:
    [found] = _problems(strategy, parallel)
    assert re.search(problem, found), found


def test_micro_batches_are_a_multiple_of_the_data_parallel_ranks() -> None:
    assert _problems("hybrid", {"gpus": 4, "ulysses_degree": 2}, loop={"micro_batches": 6}) == []
    assert _problems("ddp", {}, loop={"micro_batches": 5}) == []
    assert _problems("zero3", {"gpus": 4}, loop={"micro_batches": 6}) == [
        "loop.micro_batches=6 must be a multiple of the 4 data-parallel ranks: use 8"
    ]


@pytest.mark.parametrize(
    ("parallel", "inner"),
    [
        ({"all_to_all": "direct"}, 1),
        ({"all_to_all": "hierarchical", "fast_link_ranks": 2}, 2),
        ({"all_to_all": "hierarchical", "gpus": 2, "nnodes": 2}, 2),
        ({"compression": "bf16"}, 1),
    ],
)
def test_exchanges(parallel: dict[str, Any], inner: int) -> None:
    given = {**ULYSSES, **parallel}
    assert _problems("hybrid", given) == []
    assert TrainParallelSettings.model_validate(given).inner_ranks(ulysses=4, tensor=1) == inner
