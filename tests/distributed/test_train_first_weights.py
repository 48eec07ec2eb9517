"""First weights of ranks that divide a transformer: those of one process, and never more than a part of them."""

from itertools import chain
from pathlib import Path

import pytest
import tiny_training
import torch
from safetensors.torch import save_file
from tiny_strategies import Case
from torch import Tensor

from opensora_cli.engine.train.build import empty_transformer, fill_parts, new_transformer
from opensora_cli.engine.train.parallelize import shard
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.train import TrainSettings

TENSOR = Case("hybrid", 2, (("tensor_parallel_degree", 2),))
LORA = {"lora.rank": 2, "precision.compute": "bf16"}


def _settings(init: Path | None, *weights: Path, depth: int = 1, **changes: object) -> TrainSettings:
    return tiny_training.mmdit_settings(Path("unused"), *weights).replace(
        {"model.depth": depth, "model.depth_single_blocks": depth, "init": init and str(init), **changes}
    )


def _alone(settings: TrainSettings) -> MMDiT:
    return new_transformer(settings, device=torch.device("cpu"))


def _blocks(model: MMDiT) -> list[int]:
    """Return the bytes of each block."""
    blocks = chain(model.double_blocks, model.single_blocks)
    return [sum(weight.nbytes for weight in block.parameters()) for block in blocks]


def _saved(folder: Path, dtype: torch.dtype, *, depth: int = 1, has_references: bool = True) -> Path:
    """Write random weights, none of which is zero."""
    generator, path = torch.Generator().manual_seed(5), folder / "first.safetensors"
    weights = {
        name: torch.randn(weight.shape, generator=generator).to(dtype)
        for name, weight in empty_transformer(_settings(None, depth=depth)).named_parameters()
        if has_references or not name.startswith("cond_in.")
    }
    save_file(weights, path)
    return path


def _divided(case: Case, settings: TrainSettings) -> tuple[int, int, dict[str, Tensor], set[str]]:
    """Return the most bytes held on the way, those that are left, the whole weights, and the names of trained ones."""
    distribution = case.open()
    # Another place in torch's generator on each rank.
    torch.manual_seed(distribution.rank)
    with TensorBytes(device_type="cpu", follow_sizes=True) as counted:
        model = empty_transformer(settings)
        shard(model, distribution)
        fill_parts(model, settings, distribution=distribution)
    weights, trained = {}, set()
    for name, weight in model.named_parameters():
        whole_name = distribution.whole_name(name)
        weights[whole_name] = distribution.whole(name, weight).clone()
        if weight.requires_grad:
            trained.add(whole_name)
    return counted.peak_bytes, counted.live_bytes, weights, trained


def _assert_same(weights: dict[str, Tensor], model: MMDiT) -> None:
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    assert [name for name, weight in weights.items() if weight.dtype != expected[name].dtype] == []
    assert [name for name, weight in weights.items() if not torch.equal(weight, expected[name])] == []


@pytest.mark.parametrize(("ranks", "from_file"), [(2, True), pytest.param(4, False, marks=pytest.mark.slow)])
def test_no_rank_ever_holds_the_whole(pool, tmp_path, ranks, from_file):
    depth = 12 // ranks
    settings = _settings(_saved(tmp_path, torch.float32, depth=depth) if from_file else None, depth=depth)
    with TensorBytes(device_type="cpu") as counted:
        model = _alone(settings)
    whole, blocks = sum(weight.nbytes for weight in model.parameters()), sorted(_blocks(model))
    assert counted.peak_bytes >= whole
    bound = whole / ranks + sum(blocks[-2:])
    assert bound < 0.8 * whole
    for peak, left, weights, _ in pool(ranks).run(_divided, Case("zero3", ranks), settings):
        assert 0.9 * whole / ranks < peak < bound
        assert left < 1.1 * whole / ranks
        _assert_same(weights, model)


@pytest.mark.parametrize(
    ("case", "from_file"),
    [
        (Case("zero3", 2), True),
        (TENSOR, True),
        pytest.param(Case("zero3", 4), True, marks=pytest.mark.slow),
        *(
            pytest.param(case, False, marks=pytest.mark.slow)
            for case in (Case("zero2", 2), TENSOR, Case("hybrid", 2, (("ulysses_degree", 2),)))
        ),
    ],
    ids=str,
)
def test_parts_are_those_of_one_process(pool, tmp_path, case, from_file):
    settings = _settings(_saved(tmp_path, torch.float16, has_references=False) if from_file else None)
    model = _alone(settings)
    assert model.cond_in is not None
    assert not model.cond_in.weight.any()
    assert model.img_in.weight.any()
    for _, _, weights, trained in pool(case.ranks).run(_divided, case, settings):
        _assert_same(weights, model)
        assert trained == weights.keys()


def test_weights_beside_an_adapter_are_those_of_one_process(pool, tmp_path):
    pytest.importorskip("peft")
    settings = _settings(_saved(tmp_path, torch.float32), **LORA)
    model = _alone(settings)
    adapter = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert len(adapter) == 2 * (12 + 4)
    assert {weight.dtype for name, weight in model.named_parameters() if name not in adapter} == {torch.bfloat16}
    assert all(weight.any() for name, weight in model.named_parameters() if "lora_A" in name)
    for _, _, weights, trained in pool(2).run(_divided, Case("zero3", 2), settings):
        _assert_same(weights, model)
        assert trained == adapter
