import pytest
import torch
from torch import nn

from opensora_cli.memory.monitor import (
    AccelerationProfiler,
    ModuleTimes,
    blocks_of,
)


def test_phases_are_kept_also_when_they_fail():
    profiler = AccelerationProfiler("cpu")
    with profiler.profile("load"):
        pass
    with pytest.raises(ValueError, match="no"), profiler.profile("run"):
        raise ValueError("no")
    assert [phase.name for phase in profiler.phases] == ["load", "run"]
    assert all(phase.seconds >= 0 and phase.peak_allocated_gib is None for phase in profiler.phases)
    assert [line.split(":")[0] for line in profiler.summary()] == ["load", "run"]


def test_every_call_of_a_block_is_timed_while_it_is_watched():
    inner = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "inner": inner})
    blocks = blocks_of(model, "model")
    # Blocks inside of blocks are parts of these.
    assert list(blocks) == ["model.blocks.0", "model.blocks.1", "model.inner.0"]
    times = ModuleTimes("cpu")
    with times.watch(blocks):
        for _ in range(3):
            blocks["model.blocks.0"](torch.zeros(2))
        blocks["model.blocks.1"](torch.zeros(2))
    blocks["model.blocks.1"](torch.zeros(2))
    spreads = times.spreads()
    assert {name: spread.count for name, spread in spreads.items()} == {"model.blocks.0": 3, "model.blocks.1": 1}
    assert all(spread.mean_s >= 0 for spread in spreads.values())
    times.clear()
    assert times.spreads() == {}
