"""Runs in a terminal that goes away, as at a lost ssh connection."""

import re
import signal
import sys

import pytest
from pseudo_terminals import Terminal
from safetensors import safe_open

from opensora_cli.engine.generate.sample import STEPS_KEY

pytestmark = pytest.mark.slow

OSORA = [sys.executable, "-m", "opensora_cli"]
SMALL = ["--height", "32", "--width", "32", "--num-frames", "1"]


def test_a_generation_on_two_ranks_saves_its_latents(tmp_path):
    steps = ["--steps", "1000", "--gpus", "2", "--device", "cpu", "--out", "a.png"]
    with Terminal([*OSORA, "generate", "sea", *SMALL, *steps], cwd=tmp_path) as terminal:
        terminal.wait_for(lambda: re.search(r"\d\d/\d+ evaluations", terminal.shown))
        terminal.hang_up()
        assert terminal.end() == 130
    with safe_open(tmp_path / "a.latents.safetensors", framework="numpy") as latents:
        assert int(latents.metadata()[STEPS_KEY]) < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["a.latents.safetensors"]


def test_with_nohup_a_generation_goes_on_to_its_end(tmp_path):
    command = [*OSORA, "generate", "sea", *SMALL, "--steps", "30", "--out", "a.png"]
    with Terminal(command, ignored=[signal.SIGHUP], cwd=tmp_path) as terminal:
        terminal.wait_for(lambda: "denoise" in terminal.shown)
        terminal.hang_up()
        assert terminal.end() == 3  # its result is made, and could not be printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.png.json"]
