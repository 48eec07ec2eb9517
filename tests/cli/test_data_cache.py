"""`osora data cache`: what it prints, and with which exit code it ends."""

import json
from pathlib import Path

import pytest
import tiny_training

from opensora_cli.cli.app import main

DEMO = Path(__file__).parents[2] / "opensora_cli" / "assets" / "demo"
WEIGHTS = ("--set", f"weights={DEMO}")
FEW = (
    *WEIGHTS,
    *("--table", str(tiny_training.TABLE), "--set", "data.buckets={32px: {13: [1.0, 2]}}"),
    *("--set", "train_mmdit.video_latent_frames=1", "--set", "train_mmdit.easy_latent_frames=2"),
    *("--set", "train_mmdit.frozen_dtype=float32"),
    *("--set", "train_mmdit.mode_weights.v2v_head=0"),
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*args):
    return main(["data", "cache", *args])


@pytest.mark.slow
def test_the_demos_recipe(capsys):
    assert run("--config", "demo_lora", *FEW, "--json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    folder = str(Path("runs/demo_lora_cache"))
    assert document == {"schema": "osora.data-cache/1", "folder": folder, "clips": 8, "encoded": 8, "failed": []}
    assert "encode" in err
    assert run("--config", "demo_lora", *FEW, "--quiet") == 0
    out, err = capsys.readouterr()
    assert (out, err) == (f"{folder}  8 clips, 0 of them encoded now\n", "")
    # Another mode needs references that were not encoded; other captions are another cache.
    assert run("--config", "demo_lora", *FEW, "--set", "train_mmdit.mode_weights.v2v_head=1") == 0
    assert capsys.readouterr().out == f"{folder}  8 clips, 8 of them encoded now\n"
    assert run("--config", "demo_lora", *FEW, "--set", "train_mmdit.add_fps=true") == 3
    assert "differs in: captions" in capsys.readouterr().err
