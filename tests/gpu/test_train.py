"""Training on a GPU: it goes on bit for bit, and its checkpoints come to the host through pinned memory."""

import json
from pathlib import Path

import pytest
import tiny_training
import torch

from opensora_cli.checkpoint.shared_folder import wrong_files
from opensora_cli.engine.train.run import train
from opensora_cli.settings.train import TrainSettings


def settings(output: Path) -> TrainSettings:
    changes = {"device": "cuda", "loop.steps": 6, "checkpoints.every": 3, "optimizer.name": "adamw"}
    return tiny_training.vae_settings(output).replace(changes)


def test_six_steps_are_three_and_three(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train(settings(tmp_path / "whole"))
        with pytest.raises(KeyboardInterrupt):
            train(settings(tmp_path / "run"), reporter=tiny_training.StopAfter(3))
        train(settings(tmp_path / "run"), resume=True)
    finally:
        torch.use_deterministic_algorithms(False)
    hashes = []
    for name in ("whole", "run"):
        folder = tmp_path / name / "epoch0-global_step6"
        assert wrong_files(folder) == []
        recorded = json.loads((folder / "running_states.json").read_text())["sha256"]
        hashes.append({file: digest for file, digest in recorded.items() if file.endswith(".safetensors")})
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 3
