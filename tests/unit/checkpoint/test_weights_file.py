"""The file of weights that a run exports."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.core.exceptions import CheckpointError


def test_it_is_rounded_and_says_whose_it_is(tmp_path: Path) -> None:
    weight = torch.linspace(0, 1, 12).view(3, 4)
    path = tmp_path / "new" / "a.safetensors"
    write_weights(path, {"turned": weight.t()}, dtype=torch.float16, metadata={"of": "clips"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "of": "clips"}
        assert torch.equal(file.get_tensor("turned"), weight.t().half())


def test_what_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="large has numbers that are too large for float16"):
        write_weights(tmp_path / "a.safetensors", {"large": torch.tensor([1e6])}, dtype=torch.float16)
    assert [*tmp_path.iterdir()] == []
