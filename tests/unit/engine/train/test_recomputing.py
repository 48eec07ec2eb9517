"""What `memory.checkpointing=auto` chooses, and that it changes no bit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_training

from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.train import recomputing
from opensora_cli.engine.train.activations import ActivationPlan
from opensora_cli.engine.train.recomputing import Choice, _Ladder, agreed_choice, choose_activations
from opensora_cli.memory.kept_results import Cost
from opensora_cli.settings.train import TrainSettings

TINY = {"train_mmdit.cache": "clips", "optimizer.name": "adamw", "precision.compute": "fp32"}
SIZES = {"model.depth": 2, "model.depth_single_blocks": 3, "data.buckets": tiny_training.buckets(size=64)}
COSTS = {
    "double_blocks": [Cost(100.0, 2000.0, True), Cost(50.0, 1000.0, False)],
    "single_blocks": [Cost(98.0, 980.0, True), Cost(50.0, 500.0, False), Cost(3.0, 30.0, False)],
}
ALL = {"double_blocks": 2, "single_blocks": 3}


def settings_of(tmp_path: Path, **changes: object) -> TrainSettings:
    settings = tiny_training.mmdit_settings(tmp_path).replace({**TINY, **SIZES, "memory.checkpointing": "auto"})
    return settings.replace({key.replace("__", "."): value for key, value in changes.items()})


def kept(plan: ActivationPlan) -> list[tuple[float, dict[str, int]]]:
    return [(each.operations_a_byte, each.blocks) for each in plan.kept]


def test_the_ladder_keeps_what_costs_most_first_and_from_the_last_block_on(tmp_path: Path) -> None:
    ladder = _Ladder.of(settings_of(tmp_path), COSTS)
    assert ladder.levels == (98.0, 50.0, 3.0)
    assert ladder.top == 4 * 5
    assert kept(ladder.plan(0)) == []
    assert ladder.plan(0).recomputed.operations == 1
    assert kept(ladder.plan(1)) == [(98.0, {"double_blocks": 0, "single_blocks": 1})]
    assert kept(ladder.plan(5)) == [(98.0, ALL)]
    assert kept(ladder.plan(9)) == [(50.0, {"double_blocks": 1, "single_blocks": 3}), (98.0, ALL)]
    assert ladder.plan(9).keep()["double_blocks.0"] == 98.0
    assert ladder.plan(9).keep()["double_blocks.1"] == 50.0
    assert ladder.plan(5).recomputed.attention == 0
    assert ladder.plan(5).recomputed.products == 1
    assert kept(ladder.plan(15)) == [(3.0, ALL)]
    partly = ladder.plan(17)
    assert partly.checkpointed_blocks == {"double_blocks": 2, "single_blocks": 1}
    assert kept(partly) == [(3.0, partly.checkpointed_blocks)]
    assert ladder.plan(20).checkpointed_blocks == {"double_blocks": 0, "single_blocks": 0}
    shares = [ladder.plan(step).recomputed.operations for step in range(21)]
    assert shares == sorted(shares, reverse=True)
    # A result is as many bytes as its operations are times those of a byte.
    assert ladder.held() == [0, 10, 20, 30, 50, 70, 80, 90, 100, 120, 140, 150, 160, 170, 170, 170]


def test_streamed_blocks_stay_checkpointed_and_compiled_ones_keep_nothing(tmp_path: Path) -> None:
    streamed = settings_of(tmp_path, lora__rank=4, init="any.safetensors", memory__offload="blocks")
    assert _Ladder.of(streamed, COSTS).plan(15).checkpointed_blocks == ALL
    assert _Ladder.of(streamed, COSTS).top == 15
    whole = _Ladder.of(settings_of(tmp_path), {})
    assert [whole.plan(step).checkpointed_blocks["single_blocks"] for step in range(6)] == [3, 2, 1, 0, 0, 0]
    assert whole.plan(2).recomputed is None


class Estimates:
    """Stands in for the estimate: so many bytes at least, and what is kept, which may be more than was thought."""

    def __init__(self, least: int, *, more: float = 1.0) -> None:
        self.least, self.more, self.steps = least, more, []

    def __call__(self, settings: TrainSettings, *, rank: int, activations: Any = None, watch: Any = None) -> Any:
        held = 0
        if activations is None:
            stacks, found = watch.args
            found.update({path: COSTS[path] for path in stacks})
        else:
            self.steps.append(activations)
            ladder = _Ladder.of(settings, COSTS)
            step = next(step for step in range(21) if ladder.plan(step) == activations)
            held = (ladder.held() + [170 + 100 * count for count in range(1, 6)])[step]
        peak = self.least + round(self.more * held)
        return SimpleNamespace(peak_bytes=peak, device_peak_bytes=peak)


@pytest.mark.parametrize(
    ("free", "more", "step", "estimates"),
    [
        (1000, 1.0, 0, 0),  # not even the least fits, in nine tenths
        (1200, 1.0, 6, 1),  # 1080 bytes
        (1112, 1.0, 0, 0),
        (1200, 2.0, 3, 2),  # 1080 bytes, of which 40 can be kept at most
        (1300, 1.0, 15, 2),  # all results, and no whole block
        (1500, 1.0, 16, 2),
        (2000, 1.0, 20, 1),
    ],
)
def test_the_most_that_fits_is_held(
    free: int, more: float, step: int, estimates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = Estimates(1000, more=more)
    monkeypatch.setattr(recomputing, "estimate_training", stand_in)
    settings = settings_of(tmp_path)
    choice = choose_activations(settings, rank=0, free_bytes=free, is_gpu=True, reporter=SilentReporter())
    assert choice.plan == _Ladder.of(settings, COSTS).plan(step)
    assert choice.height == step / 20
    assert len(stand_in.steps) == estimates
    assert choice.memory.peak_bytes <= max(0.9 * free, 1000)


def test_one_process_keeps_its_choice(tmp_path: Path) -> None:
    plan = _Ladder.of(settings_of(tmp_path), COSTS).plan(7)
    assert agreed_choice(None, ranks=4) is None
    assert agreed_choice(Choice(0.3, plan, None), ranks=1) == plan
