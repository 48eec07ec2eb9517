import torch
from torch import nn

from opensora_cli.memory.checkpointing import blocks_of
from opensora_cli.memory.monitor import ModuleTimes


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
