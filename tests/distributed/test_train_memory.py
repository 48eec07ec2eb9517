"""Estimated memory of a rank in training, against real gloo ranks that do the same steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_training
import torch

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.train.distribution import distribution_of
from opensora_cli.engine.train.estimate import measure_training
from opensora_cli.engine.train.rank_memory import RankMemory, estimate_rank
from opensora_cli.settings.train import TrainSettings

Pool = Callable[[int], Any]

VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "fp32 without average": {"precision.compute": "fp32", "loop.ema_decay": None},
    "checkpointed": {"memory.checkpointing": "full", "memory.checkpoint_single_blocks": 1},
    "activations offloaded": {"memory.checkpointing": "offload"},
    "states offloaded": {"optimizer.offload_states": True},
    "two micro-batches": {"loop.micro_batches": 8},
    # Its file is not read: the weights are random.
    "lora": {"lora.rank": 4, "init": "any.safetensors"},
}
HYBRID = {"strategy": "hybrid"}
TENSOR, ULYSSES, RING = ({f"parallel.{kind}_degree": 2} for kind in ("tensor_parallel", "ulysses", "ring"))
# Every strategy and every number of ranks once, and every variant with data-parallel ranks and with ranks that share
# clips.
CASES: list[tuple[int, dict[str, object], str]] = [
    (2, {"strategy": "ddp"}, "plain"),
    (4, {"strategy": "ddp"}, "checkpointed"),
    (2, {"strategy": "ddp"}, "lora"),
    (2, {"strategy": "zero1"}, "states offloaded"),
    (4, {"strategy": "zero1"}, "two micro-batches"),
    (2, {"strategy": "zero2"}, "fp32 without average"),
    (4, {"strategy": "zero2"}, "activations offloaded"),
    (2, {"strategy": "zero3"}, "lora"),
    (4, {"strategy": "zero3"}, "plain"),
    (4, {"strategy": "zero3", "parallel.dp_shard_degree": 2}, "states offloaded"),
    (2, {**HYBRID, **TENSOR}, "fp32 without average"),
    (4, {**HYBRID, **TENSOR}, "checkpointed"),
    (2, {**HYBRID, **ULYSSES}, "two micro-batches"),
    (4, {**HYBRID, **ULYSSES}, "lora"),
    (2, {**HYBRID, **RING}, "activations offloaded"),
    (4, {**HYBRID, **RING}, "states offloaded"),
    (4, {**HYBRID, **TENSOR, **ULYSSES}, "plain"),
    (4, {**HYBRID, **ULYSSES, **RING}, "checkpointed"),
]
_MOST = [name for name in RankMemory.model_fields if name not in ("peak_bytes", "device_peak_bytes", "mapped_bytes")]


def settings_of(folder: Path, ranks: int, strategy: dict[str, object], variant: str) -> TrainSettings:
    sizes = {"model.hidden_size": 64, "model.num_heads": 4, "model.depth": 2, "model.depth_single_blocks": 3}
    changes = {"optimizer.name": "adamw", "parallel.gpus": ranks, **sizes, **strategy, **VARIANTS[variant]}
    return tiny_training.mmdit_settings(folder).replace(changes)


def measured(settings: TrainSettings) -> RankMemory:
    """Run on every rank: return what it held."""
    distribution = distribution_of(settings, device=torch.device("cpu"))
    return RankMemory.of(measure_training(settings, distribution=distribution), settings)


def check(pool: Pool, settings: TrainSettings) -> None:
    if settings.strategy.shards and torch.__version__ < "2.11":
        with pytest.raises(HardwareError, match="not estimated with torch"):
            estimate_rank(settings)
        return
    estimate = estimate_rank(settings)
    real, *others = pool(settings.parallel.world_size).run(measured, settings)
    assert estimate.peak_bytes == pytest.approx(real.peak_bytes, rel=0.1), (estimate, real)
    assert estimate.device_peak_bytes == pytest.approx(real.device_peak_bytes, rel=0.1), (estimate, real)
    for name in _MOST:
        # Of what is small beside the rest, a tenth of the whole would not be noticed.
        margin = 0.02 * real.peak_bytes
        assert getattr(estimate, name) == pytest.approx(getattr(real, name), rel=0.1, abs=margin), (name, real)
    # No other rank needs more.
    assert max(each.device_peak_bytes for each in others) < 1.1 * estimate.device_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy", "variant"), CASES, ids=str)
def test_every_strategy_and_stage(
    ranks: int, strategy: dict[str, object], variant: str, tmp_path: Path, pool: Pool
) -> None:
    check(pool, settings_of(tmp_path, ranks, strategy, variant))
