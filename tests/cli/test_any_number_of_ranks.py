"""`osora generate --gpus N` makes the same video for every N."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opensora_cli.cli.app import main


def frames(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)).astype(int) for path in sorted(folder.glob("*.png"))])


@pytest.mark.slow
def test_from_one_to_eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["generate", "raining, sea", "--seed", "7", "--device", "cpu", "--num-frames", "9", "--steps", "2"]
    for ranks in range(1, 9):
        assert main([*short, "--gpus", str(ranks), "--format", "png", "--out", f"{ranks}.png", "--quiet"]) == 0
    alone = frames(Path("1"))
    assert alone.shape == (9, 64, 64, 3)
    for ranks in range(2, 9):
        assert np.abs(frames(Path(str(ranks))) - alone).max() <= 1, ranks
