"""Predicted times of training steps on GPUs that are not here."""

from pathlib import Path

import pytest
import tiny_training

from opensora_cli.engine.estimate.predicted_time import (
    ATTENTION,
    COLLECTIVES,
    COPIES,
    ENCODING,
    PRODUCTS,
    UPDATE,
)
from opensora_cli.engine.train.memory import plan_frozen_weights
from opensora_cli.engine.train.predicted import predict_step
from opensora_cli.settings.hardware import read_machine
from opensora_cli.settings.train import TrainSettings

H100 = read_machine("H100").gpu.replace({"launch_us": 1e-6})
"""The host is not waited for."""


def settings_of(tmp_path: Path, **changes: object) -> TrainSettings:
    # So large that products do not wait for their weights.
    model = {"model.hidden_size": 2048, "model.axes_dim": (256, 384, 384)}
    settings = tiny_training.mmdit_settings(tmp_path / "run").replace(
        {**model, "data.buckets": tiny_training.buckets(size=128), "optimizer.name": "adamw", "strategy": "ddp"}
    )
    return settings.replace({key.replace("__", "."): value for key, value in changes.items()})


def parts_of(settings: TrainSettings) -> dict[str, float]:
    found = predict_step(settings, H100)
    assert found is not None
    assert sum(found.parts_s.values()) == pytest.approx(found.seconds)
    return dict(found.parts_s)


def test_a_backward_pass_does_twice_the_products(tmp_path: Path) -> None:
    trained = parts_of(settings_of(tmp_path))
    assert trained[ENCODING] > 0 < trained[UPDATE]
    adapter = parts_of(settings_of(tmp_path, lora__rank=4, init="first.safetensors"))
    assert adapter[PRODUCTS] == pytest.approx(trained[PRODUCTS] * 2 / 3)
    assert adapter[UPDATE] < 0.1 * trained[UPDATE]
    again = parts_of(settings_of(tmp_path, memory__checkpointing="full"))
    assert again[PRODUCTS] == pytest.approx(trained[PRODUCTS] * 4 / 3, rel=0.01)


def test_attention_that_is_kept_is_not_predicted_again(tmp_path: Path) -> None:
    plain, full, selective = (
        parts_of(settings_of(tmp_path, memory__checkpointing=how)) for how in ("none", "full", "selective")
    )
    assert selective[ATTENTION] == plain[ATTENTION] < full[ATTENTION]
    assert plain[PRODUCTS] < selective[PRODUCTS] == full[PRODUCTS]


def test_ranks_share_weights_and_wait_for_gradients(tmp_path: Path) -> None:
    alone = parts_of(settings_of(tmp_path))
    sharded = parts_of(settings_of(tmp_path, parallel__gpus=4, strategy="zero2"))
    assert sharded[UPDATE] == pytest.approx(alone[UPDATE] / 4)
    assert sharded[PRODUCTS] == alone[PRODUCTS]
    shared = parts_of(settings_of(tmp_path, parallel__gpus=2, strategy="hybrid", parallel__ring_degree=2))
    assert alone[PRODUCTS] / 2 < shared[PRODUCTS] < 0.7 * alone[PRODUCTS]
    two = predict_step(settings_of(tmp_path, loop__micro_batches=2), H100)
    one = predict_step(settings_of(tmp_path), H100)
    assert one is not None
    assert two is not None
    assert two.stages_s["forward and backward"] == pytest.approx(2 * one.stages_s["forward and backward"])
    slow = H100.replace({"gpu_link": {"peak_gb_per_s": 1, "attainable_gb_per_s": 1}})
    waiting = predict_step(settings_of(tmp_path, parallel__gpus=4, strategy="zero2"), slow)
    assert waiting is not None
    assert waiting.parts_s[COLLECTIVES] > 10 * sharded.get(COLLECTIVES, 0.0)


@pytest.mark.slow
def test_frozen_blocks_that_wait_on_the_host_come_twice(tmp_path: Path) -> None:
    given = {"lora__rank": 4, "init": "first.safetensors", "model__depth": 3, "memory__checkpointing": "full"}
    resident = parts_of(settings_of(tmp_path, **given))
    assert COPIES not in resident
    streamed = settings_of(tmp_path, **given, device="cuda", memory__offload="blocks", memory__host_weights="mapped")
    weights = plan_frozen_weights(streamed)
    assert weights is not None
    assert weights.host_bytes > 0
    # From mapped files, at half the speed of page-locked memory.
    waited = 2 * weights.host_bytes / (52e9 / 2)
    assert parts_of(streamed)[COPIES] == pytest.approx(waited)
    pinned = parts_of(streamed.replace({"memory.host_weights": "pinned"}))
    assert pinned.get(COPIES, 0.0) < waited / 2


def test_states_on_the_host_wait_for_the_link(tmp_path: Path) -> None:
    ranks = {"strategy": "zero1", "parallel__gpus": 2}
    usual, offloaded = (settings_of(tmp_path, **ranks, optimizer__offload_states=on) for on in (False, True))
    # AdamW reads and writes 40 bytes of a number; its weight and its gradient take 8 of the link, 52e9 a second.
    numbers = parts_of(usual)[UPDATE] * 3015e9 / 40
    found = predict_step(offloaded, H100)
    assert found is not None
    assert found.stages_s["update"] == pytest.approx(8 * numbers / 52e9)
    assert "updating weights on the CPU" in found.left_out


def test_what_is_not_predicted(tmp_path: Path) -> None:
    assert predict_step(tiny_training.vae_settings(tmp_path / "run"), H100) is None
