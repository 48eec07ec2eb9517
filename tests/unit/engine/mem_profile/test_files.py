import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from opensora_cli.core.exceptions import OutputError
from opensora_cli.engine.mem_profile.files import counted_history, write_snapshot
from opensora_cli.memory.counting import TensorBytes


@pytest.fixture
def counter() -> TensorBytes:
    layer = nn.Linear(64, 64)
    with TensorBytes() as counter, counter.watch(layer, "layer"):
        counter.add(layer, "weights")
        for _ in range(2):
            layer(torch.zeros(8, 64))
        grown = torch.zeros(4)
        grown.resize_(100_000)
    return counter


def test_every_storage_is_allocated_once_and_freed(counter: TensorBytes):
    (events,) = counted_history([counter, counter])["device_traces"]
    live: dict[int, int] = {}
    most = 0
    for event in events:
        if event["action"] == "alloc":
            assert event["addr"] not in live
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
        most = max(most, sum(live.values()))
    assert live == {}
    assert most == counter.peak_bytes > 400_000
    assert {event["frames"][0]["name"] for event in events} >= {"weights", "layer"}


def test_pytorch_reads_the_written_history(counter: TensorBytes, tmp_path: Path):
    path = tmp_path / "history.pickle"
    write_snapshot(path, [counter], device=torch.device("cpu"), replace=False)
    history = pickle.loads(path.read_bytes())
    shown = _memory_viz.trace(history)
    assert f"{len(history['device_traces'][0])} entries" in shown
    assert "390.6KiB" in shown  # what was resized
    with pytest.raises(OutputError, match="exists already"):
        write_snapshot(path, [counter], device=torch.device("cpu"), replace=False)
