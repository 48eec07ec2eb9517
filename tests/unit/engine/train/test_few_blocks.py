"""The bytes of a step through few blocks, against those of a step through all."""

from pathlib import Path

import pytest
import tiny_training

from opensora_cli.engine.train import few_blocks
from opensora_cli.engine.train.estimate import TrainingMemory, estimate_training
from opensora_cli.settings.layers import Given
from opensora_cli.settings.train import TrainSettings, load_train_settings

TINY = {"train_mmdit.cache": "clips", "optimizer.name": "adamw", "precision.compute": "bf16"}
DEEP = {**TINY, "model.depth": 7, "model.depth_single_blocks": 5, "model.hidden_size": 64, "model.num_heads": 4}
CHECKPOINTED = {"memory.checkpointing": "full", "memory.checkpoint_double_blocks": 2}
LORA = {"lora.rank": 4, "init": "any.safetensors", "memory.checkpointing": "full"}
TWICE = {"loop.micro_batches": 8}


def slow(name: str, changes: dict[str, object]) -> object:
    return pytest.param({**DEEP, **changes}, id=name, marks=pytest.mark.slow)


def assert_alike(settings: TrainSettings, monkeypatch: pytest.MonkeyPatch, *, rel: float) -> None:
    few = estimate_training(settings)
    monkeypatch.setattr(few_blocks, "FEW", 100)
    whole = estimate_training(settings)
    assert len(few.by_weight) < len(whole.by_weight)
    assert few.held_for_backward == pytest.approx(whole.held_for_backward, rel=rel)
    sizes, whole_sizes = (memory.rank.model_dump(exclude={"at_peak"}) for memory in (few, whole))
    assert sizes == pytest.approx(whole_sizes, rel=rel)
    if not rel:
        assert few.rank.at_peak == whole.rank.at_peak
    assert _sums(few) == _sums(whole)


def _sums(memory: TrainingMemory) -> list[int]:
    return [sum(column) for column in zip(*memory.by_weight.values(), strict=True)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({**TINY, **LORA, "model.depth_single_blocks": 4, "memory.offload": "blocks"}, id="one stack"),
        slow("as it is", {}),
        slow("checkpointed", CHECKPOINTED),
        slow("two micro-batches", {**CHECKPOINTED, "loop.micro_batches": 2}),
        slow("selective", {**CHECKPOINTED, "memory.checkpointing": "selective"}),
        slow("offloaded activations", {**CHECKPOINTED, "memory.checkpointing": "offload"}),
        slow("streamed", {**LORA, "memory.offload": "blocks"}),
        slow("in 8 bits", {**LORA, "memory.fp8_storage": True}),
        slow("ddp", {"strategy": "ddp", "parallel.gpus": 2, **CHECKPOINTED}),
        slow("zero1", {"strategy": "zero1", "parallel.gpus": 4, **TWICE}),
        slow("zero2", {"strategy": "zero2", "parallel.gpus": 4, **CHECKPOINTED}),
        slow("zero2 twice", {"strategy": "zero2", "parallel.gpus": 4, **CHECKPOINTED, **TWICE}),
        slow("zero3", {"strategy": "zero3", "parallel.gpus": 4, **CHECKPOINTED}),
        slow("hybrid", {"strategy": "hybrid", "parallel.gpus": 4, "parallel.ring_degree": 2, **TWICE}),
    ],
)
def test_few_blocks_take_what_all_take(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_alike(tiny_training.mmdit_settings(tmp_path).replace(changes), monkeypatch, rel=0)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["stage1", "stage2"])
def test_so_it_is_at_full_size(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"parallel.gpus": Given(8, "--on")}
    settings = load_train_settings(
        config=Path(recipe), overrides=given, environment={}, saved=None, report=lambda line: None
    )
    assert_alike(settings, monkeypatch, rel=0.01)
