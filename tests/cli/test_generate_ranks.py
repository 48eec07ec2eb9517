"""`osora generate --gpus`: what several processes make is what one makes, and when one ends all end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from opensora_cli.cli.app import main

# Of one size with the clip there would be a single tile, which rank 0 decodes.
TILES = [
    word for key in ("sample_size=32", "temporal_tiling=true", "sample_tsize=16") for word in ("--set", f"vae.{key}")
]
SHORT = ["generate", "raining, sea", "--seed", "7", "--device", "cpu", "--num-frames", "5"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def frames(folder: str) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)).astype(int) for path in sorted(Path(folder).glob("*.png"))])


def test_two_processes_make_what_one_makes() -> None:
    short = [*SHORT, *TILES, "--num-frames", "17", "--steps", "2", "--format", "png"]
    command = [sys.executable, "-m", "opensora_cli", *short]
    done = subprocess.run([*command, "--gpus", "2", "--out", "two.png", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "devices: 2, Ulysses 2" in done.stderr
    document = json.loads(done.stdout)
    assert [output["path"] for output in document["outputs"]] == ["two"]
    assert json.loads(Path("two.json").read_text())["settings"]["parallel"]["gpus"] is None
    assert main([*short, "--out", "one.png"]) == 0
    one, two = frames("one"), frames("two")
    assert one.shape == two.shape == (17, 64, 64, 3)
    assert np.abs(one - two).max() <= 1


def test_the_environment_does_not_overrule_the_command_line() -> None:
    """Neither what is machine's own, for ranks as for one process."""
    environment = {**os.environ, "OSORA_WEIGHTS": "/nowhere", "OSORA_MEMORY__OFFLOAD": "none"}
    flags = ["--steps", "1", "--gpus", "2", "--out", "a.png", "--offload", "blocks", "--weights", "elsewhere"]
    done = subprocess.run(
        [sys.executable, "-m", "opensora_cli", *SHORT, *flags], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    settings = json.loads(Path("a.json").read_text())["settings"]
    assert settings["runtime"]["weights"] == "elsewhere"
    assert settings["memory"]["offload"] == "blocks"


def test_what_can_be_known_before_is_told_before_ranks_start(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.mp4").touch()
    assert main([*SHORT, "--gpus", "2", "--out", "a.mp4"]) == 3
    assert "a.mp4 exists already" in capsys.readouterr().err
    assert main([*SHORT, "--gpus", "33", "--set", "parallel.ring_degree=33"]) == 2
    assert "33 devices cannot share 32 tokens" in capsys.readouterr().err
    assert main([*SHORT, "--gpus", "3", "--set", "parallel.cfg_parallel_degree=3"]) == 2
    assert "use at most 2" in capsys.readouterr().err
    assert main(["generate", "raining, sea", "--devices", "3"]) == 4
    assert "runtime.device=cuda:3 is not there" in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["load", pytest.param("denoise", marks=pytest.mark.slow)])
def test_a_killed_rank_ends_all(stage: str) -> None:
    command = [sys.executable, "-m", "opensora_cli", *SHORT, "--steps", "1000", "--gpus", "2", "--out", "a.mp4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        launcher = psutil.Process(run.pid)
        try:
            assert run.stderr is not None
            before = []
            for line in run.stderr:
                before.append(line)
                if line.startswith(stage):
                    break
            ranks = [child for child in launcher.children() if rank_of(child) is not None]
            assert sorted(map(rank_of, ranks)) == [0, 1]
            os.kill(next(rank.pid for rank in ranks if rank_of(rank) == 1), signal.SIGKILL)
            start = time.monotonic()
            err = run.stderr.read()
            assert run.wait(timeout=20) == 4, "".join(before) + err
            assert time.monotonic() - start < 20
        finally:
            run.kill()
    assert re.search(r"rank 1 .*SIGKILL", err), err
    assert "Traceback" not in err
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    assert not Path("a.mp4").exists()


def rank_of(process: psutil.Process) -> int | None:
    try:
        return int(process.environ()["RANK"])
    except (KeyError, psutil.Error):
        return None


def test_more_cards_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "raining, sea", "--gpus", "100"]) == 4
    err = capsys.readouterr().err
    assert "gpus=100, and this machine has" in err


def test_the_plan_says_how_the_work_is_shared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT[:-2], "--gpus", "2", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mesh"]["ulysses"] == 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "RANK is set, but LOCAL_RANK and WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not"),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "3 devices are asked for, and 2 ranks were started",
        ),
    ],
)
def test_contradictory_ranks(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([*SHORT, "--gpus", "3"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
