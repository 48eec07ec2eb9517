"""The folder of a training checkpoint, written by one process: complete or absent, and checked by its hashes."""

import json
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opensora_cli.checkpoint import shared_folder
from opensora_cli.checkpoint.formats.safetensors import open_safetensors
from opensora_cli.checkpoint.shared_folder import (
    BackgroundJob,
    Share,
    recorded_hashes,
    temporary_folder,
    write_share,
    wrong_files,
)

NAME = "epoch0-global_step1"


def tensors(count: int = 5) -> dict[str, Tensor]:
    made = {f"w{number}": torch.full((number + 1, 3), float(number)) for number in range(count)}
    return {**made, "half": torch.ones(3, dtype=torch.float16), "empty": torch.zeros(0, 2), "scalar": torch.tensor(7)}


def write(run: Path, *, count: int = 5, name: str = "optimizer/updates.json") -> Path:
    made = {"ema.safetensors": tensors(count), "model": tensors(count)}
    share = Share(tensors=made, files={name: b"{}"}, running_states={"global_step": 1})
    write_share(share, temporary_folder(run / NAME, token="ab"), run / NAME)
    return run / NAME


def test_a_folder_has_all_tensors_and_hashes(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    for name in ("ema.safetensors", "model/model-00001-of-00001.safetensors"):
        entries, _ = open_safetensors(folder / name)
        found = {key: entry.read() for key, entry in entries.items()}
        assert found.keys() == tensors().keys()
        for key, tensor in tensors().items():
            assert torch.equal(found[key], tensor)
            assert found[key].dtype == tensor.dtype
    assert len(recorded_hashes(folder)) == 4
    assert wrong_files(folder) == []
    index = json.loads((folder / "model/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors().keys()
    assert json.loads((folder / "running_states.json").read_text())["global_step"] == 1


def test_waiting_for_a_job_is_a_sign_of_work_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    moves, job, may_end = [], BackgroundJob(), threading.Event()

    def move() -> None:
        moves.append(1)
        if len(moves) == 3:
            may_end.set()

    monkeypatch.setattr(shared_folder, "move", move)
    monkeypatch.setattr(shared_folder, "_SIGN_S", 0.01)
    job.start(lambda: None if may_end.wait(60.0) else pytest.fail("no sign came"))
    assert job.wait() is None
    assert len(moves) >= 3
