"""Estimated memory of a rank in training, against real gloo ranks that do the same steps."""

import pytest
import tiny_training
import torch
from tiny_strategies import Case

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.train.distribution import distribution_of
from opensora_cli.engine.train.estimate import RankMemory, estimate_training, measure_training
from opensora_cli.settings.train import TrainSettings

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
TENSOR, ULYSSES, RING = ((f"{kind}_degree", 2) for kind in ("tensor_parallel", "ulysses", "ring"))
# Every strategy and every number of ranks once, and every variant with data-parallel ranks and with ranks that share
# clips.
CASES = [
    (Case("ddp", 2), "plain"),
    (Case("ddp", 4), "checkpointed"),
    (Case("ddp", 2), "lora"),
    (Case("zero1", 2), "states offloaded"),
    (Case("zero1", 4), "two micro-batches"),
    (Case("zero2", 2), "fp32 without average"),
    (Case("zero2", 4), "activations offloaded"),
    (Case("zero3", 2), "lora"),
    (Case("zero3", 4), "plain"),
    (Case("zero3", 4, (("dp_shard_degree", 2),)), "states offloaded"),
    (Case("hybrid", 2, (TENSOR,)), "fp32 without average"),
    (Case("hybrid", 4, (TENSOR,)), "checkpointed"),
    (Case("hybrid", 2, (ULYSSES,)), "two micro-batches"),
    (Case("hybrid", 4, (ULYSSES,)), "lora"),
    (Case("hybrid", 2, (RING,)), "activations offloaded"),
    (Case("hybrid", 4, (RING,)), "states offloaded"),
    (Case("hybrid", 4, (TENSOR, ULYSSES)), "plain"),
    (Case("hybrid", 4, (ULYSSES, RING)), "checkpointed"),
]


def measured(settings: TrainSettings) -> RankMemory:
    distribution = distribution_of(settings, device=torch.device("cpu"))
    return measure_training(settings, distribution=distribution).rank


@pytest.mark.slow
@pytest.mark.parametrize(("case", "variant"), CASES, ids=str)
def test_every_strategy_and_stage(case, variant, tmp_path, pool):
    sizes = {"model.hidden_size": 64, "model.num_heads": 4, "model.depth": 2, "model.depth_single_blocks": 3}
    ranks = {"strategy": case.strategy, "parallel.gpus": case.ranks}
    ranks |= {f"parallel.{name}": degree for name, degree in case.degrees}
    changes = {"optimizer.name": "adamw", **sizes, **ranks, **VARIANTS[variant]}
    settings = tiny_training.mmdit_settings(tmp_path).replace(changes)
    if settings.strategy.shards and torch.__version__ < "2.11":
        with pytest.raises(HardwareError, match="not estimated with torch"):
            estimate_training(settings)
        return
    estimate = estimate_training(settings).rank
    real, *others = pool(case.ranks).run(measured, settings)
    assert estimate.peak_bytes == pytest.approx(real.peak_bytes, rel=0.1), (estimate, real)
    assert estimate.device_peak_bytes == pytest.approx(real.device_peak_bytes, rel=0.1), (estimate, real)
    # Of what is small beside the rest, a tenth of the whole would not be noticed.
    assert estimate.at_peak == pytest.approx(real.at_peak, rel=0.1, abs=0.02 * real.peak_bytes)
    # No other rank needs more.
    assert max(each.device_peak_bytes for each in others) < 1.1 * estimate.device_peak_bytes
