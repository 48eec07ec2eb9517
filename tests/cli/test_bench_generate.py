"""`osora bench-generate`: what it prints and writes, and its exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SHORT = ["bench-generate", "--device", "cpu", "--num-frames", "1", "--steps", "4", "--model", "demo"]
FEWER = ["--try", "sampling.num_inference_steps=2"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_exact_run_alone_is_timed_by_stage(osora) -> None:
    captured = osora(*SHORT, "--try", "exact", "--repeats", "2")
    _, head, exact, _, _, measures = captured.out.splitlines()
    assert head.split()[:7] == ["setting", "text", "s", "denoise", "s", "decode", "s"]
    assert re.fullmatch(r"exact( +\d+\.\d\d){3} +\d+\.\d\d ±\d+\.\d\d", exact)
    assert re.match(r"exact +8 ", measures)
    assert "run 1 of 2: exact, a few steps to warm up" in captured.err


@pytest.mark.slow
def test_two_processes_compare_what_one_does() -> None:
    command = [sys.executable, "-m", "opensora_cli", *SHORT, *FEWER, "--gpus", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    exact, fewer = document["settings"]
    assert (document["ranks"], exact["evaluations"], fewer["evaluations"]) == (2, 8, 4)
    assert 0 < fewer["psnr_db"] < 99
    assert os.listdir() == []
