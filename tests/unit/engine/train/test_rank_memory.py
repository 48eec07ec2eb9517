"""A run on a CPU is refused before it starts where the memory is short."""

from pathlib import Path

import pytest
import tiny_training

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.limits import PrivateMemory
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.train import plan
from opensora_cli.engine.train.plan import refuse_lack_of_memory
from opensora_cli.engine.train.run import train

ESTIMATE = tiny_training.rank_memory(100)


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    memory = PrivateMemory(free_bytes=num_bytes, total_bytes=2**60)
    monkeypatch.setattr(plan, "read_private_memory", lambda: memory)


def test_nothing_is_estimated_where_memory_is_plentiful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2**60)
    monkeypatch.delattr(plan, "estimate_rank")
    refuse_lack_of_memory(tiny_training.vae_settings(tmp_path / "run"), rank=0, reporter=SilentReporter())


def test_a_run_that_does_not_fit_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "estimate_rank", lambda settings, *, rank, reporter: ESTIMATE)
    settings = tiny_training.vae_settings(tmp_path / "run")
    free(monkeypatch, 99)
    with pytest.raises(HardwareError, match=r"^a step needs 100 bytes of memory on each rank, and 99 ") as caught:
        train(settings)
    assert caught.value.exit_code == 4
    assert "memory.checkpointing=full" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()
    free(monkeypatch, 100)
    refuse_lack_of_memory(settings, rank=0, reporter=SilentReporter())
    # Two ranks share the memory of a machine.
    with pytest.raises(HardwareError):
        refuse_lack_of_memory(settings.replace({"parallel.gpus": 2}), rank=1, reporter=SilentReporter())
