"""The estimate of a training step against tensors that are really allocated."""

from pathlib import Path

import pytest
import tiny_frozen
import tiny_training
from tiny_training import buckets

from opensora_cli.engine.train.estimate import estimate_training, measure_training
from opensora_cli.engine.train.objectives import find_objective
from opensora_cli.settings.train import TrainSettings

ADAMW = {"optimizer.name": "adamw"}
CHECKPOINTED = {"memory.checkpointing": "full"}
OFFLOADED = {"memory.checkpointing": "offload", "data.buckets": buckets(batch_size=1)}
LORA = {
    **ADAMW,
    # Its file is not read: the weights are random.
    **{"lora.rank": 4, "init": "any.safetensors", "train_mmdit.cache": "clips"},
    **{"model.hidden_size": 96, "model.num_heads": 6, "model.depth": 1, "model.depth_single_blocks": 3},
}
STREAMED = {**LORA, **CHECKPOINTED, "memory.offload": "blocks"}
OPPOSED = {"train_vae.discriminator": {"weight": 0.1, "width": 8, "layers": 2, "start_step": 9}}
RELEASED_WIDTHS = {"model.context_in_dim": 4096, "model.vec_in_dim": 768}


def settings_of(target: str, folder: Path, changes: dict[str, object]) -> TrainSettings:
    return getattr(tiny_training, f"{target}_settings")(folder).replace(changes)


def slow(target: str, changes: dict[str, object], name: str) -> object:
    return pytest.param(target, changes, id=f"{target} {name}", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        slow("mmdit", OFFLOADED, "offloaded"),
        pytest.param("mmdit", STREAMED, id="mmdit streamed"),
        slow("mmdit", {**STREAMED, "memory.fp8_storage": True}, "streamed in 8 bits"),
        slow("mmdit", {**STREAMED, "memory.resident_blocks": 3, "precision.compute": "fp32"}, "streamed in float32"),
        slow("mmdit", {**LORA, "memory.fp8_storage": True}, "in 8 bits"),
        slow("mmdit", {**LORA, "train_mmdit.cache": None}, "an adapter"),
        slow("mmdit", {}, "as it is"),
        slow("mmdit", {"data.buckets": buckets(batch_size=6)}, "a larger batch"),
        slow("mmdit", {"data.buckets": buckets(batch_size=6), **CHECKPOINTED}, "checkpointed"),
        slow("mmdit", {"model.depth": 3, **CHECKPOINTED, "memory.checkpoint_single_blocks": 0}, "one stack"),
        slow("mmdit", {"precision.compute": "fp32", **ADAMW, "model.depth_single_blocks": 3}, "in float32"),
        slow(
            "mmdit",
            {
                "data.buckets": buckets(17, size=64),
                "model.hidden_size": 64,
                "model.num_heads": 4,
            },
            "longer and wider",
        ),
        slow("vae", ADAMW, "with adamw"),
        slow("vae", {}, "with muon"),
        slow("vae", {"data.buckets": buckets(5, batch_size=3), "precision.compute": "fp32"}, "in float32"),
        slow("vae", OPPOSED, "against a discriminator"),
    ],
)
def test_a_step_takes_what_was_estimated(target: str, changes: dict[str, object], tmp_path: Path) -> None:
    settings = settings_of(target, tmp_path, changes)
    expected, found = estimate_training(settings), measure_training(settings)
    assert expected.rank.peak_bytes == pytest.approx(found.rank.peak_bytes, rel=0.1)
    assert expected.held_for_backward == pytest.approx(found.held_for_backward, rel=0.1)
    for name in ("weights", "average", "optimizer", "frozen parts"):
        assert expected.rank.at_peak[name] == pytest.approx(found.rank.at_peak[name], rel=0.1), name
    assert (found.rank.at_peak["frozen parts"] > 0) == (target == "mmdit" and settings.train_mmdit.cache is None)
    assert sum(found.rank.at_peak.values()) == found.rank.peak_bytes
    offloaded = [memory.counter.most_of("offloaded".__eq__) for memory in (expected, found)]
    assert offloaded[0] == pytest.approx(offloaded[1], rel=0.1)
    assert (offloaded[1] > 0) == (settings.memory.checkpointing == "offload")
    assert not tmp_path.joinpath("log.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "steps"),
    [({}, (0, 1)), (OPPOSED, (0, 0, 9))],
)
def test_the_last_phase_of_an_autoencoder_is_among_the_steps(
    changes: dict[str, object], steps: tuple[int, ...], tmp_path: Path
) -> None:
    settings = settings_of("vae", tmp_path, changes)
    assert find_objective(settings).measured_steps(settings) == steps


@pytest.mark.slow
def test_bytes_add_up_by_weight_and_text_encoders_have_the_sizes_in_their_folders(tmp_path: Path) -> None:
    folder = str(tiny_frozen.save_frozen_parts(tmp_path))
    alone = {**ADAMW, **RELEASED_WIDTHS, "weights": [folder], "data.buckets": buckets(batch_size=1)}
    memory = estimate_training(settings_of("mmdit", tmp_path, alone))
    assert 0 < memory.rank.at_peak["frozen parts"] < 10**6
    weights = sum(size for _, size in memory.by_weight.values())
    assert memory.rank.at_peak["weights"] == memory.rank.at_peak["average"] == weights


@pytest.mark.slow
def test_text_encoders_without_a_folder_are_the_released_ones(tmp_path: Path) -> None:
    small = settings_of("mmdit", tmp_path, {})
    # Of T5 XXL's encoder, and of CLIP L's text tower.
    expected = 4_762_310_656 + 123_060_480
    autoencoder = estimate_training(small.replace({"target": "vae"})).rank.at_peak["weights"]
    settings = small.replace({**RELEASED_WIDTHS, "train_mmdit.frozen_dtype": "bfloat16"})
    frozen = estimate_training(settings).rank.at_peak["frozen parts"]
    assert frozen == pytest.approx(2 * (expected + autoencoder / 4), rel=1e-3)
