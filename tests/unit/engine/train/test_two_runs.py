"""Two runs in one folder at a time: the second is refused, and leaves the first alone."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_training

from opensora_cli.core.exceptions import OutputError
from opensora_cli.engine.train.resuming import Resume
from opensora_cli.engine.train.run import train
from opensora_cli.settings.train import TrainSettings

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")


def _settings(run: Path, *, steps: int) -> TrainSettings:
    """Clips read by two workers, which are forked."""
    return tiny_training.vae_settings(run).replace(
        {
            "loop.steps": steps,
            "optimizer.decay_steps": 0,
            "checkpoints.every": 1,
            "data.workers": 2,
            "train_vae.picture_steps": 0,
            "train_vae.whitening_clips": 0,
        }
    )


def _command(settings: TrainSettings, folder: Path) -> list[str]:
    path = folder / "settings.json"
    path.write_text(json.dumps(settings.model_dump(mode="json")))
    return [sys.executable, "-m", "opensora_cli", "train", "--from", str(path), "--quiet"]


@pytest.fixture
def going(tmp_path: Path) -> Iterator[tuple[Path, "subprocess.Popen[bytes]"]]:
    """The folder of a run that does not end by itself, and its process."""
    run, environment = tmp_path / "run", {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        _command(_settings(run, steps=10**6), tmp_path),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    try:
        deadline = time.monotonic() + 240
        while not any(run.glob("epoch*")):
            assert process.poll() is None, process.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield run, process
    finally:
        process.kill()
        process.communicate()


def test_the_second_run_is_refused_and_the_first_continues(going, tmp_path):
    run, process = going
    refusal = re.escape(f"{run} is in use by another run: process {process.pid} on ")
    for choice in ({"resume": Resume()}, {"overwrite": True}):
        with pytest.raises(OutputError, match=refusal):
            train(_settings(run, steps=5), **choice)
    assert json.loads((run / "settings.json").read_text())["loop"]["steps"] == 10**6
    assert process.poll() is None

    process.kill()
    process.wait()
    steps = [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    saved = max(int(path.name.rpartition("step")[2]) for path in run.glob("epoch*"))
    # At once: there is nothing to clean up.
    result = train(_settings(run, steps=saved + 1), resume=Resume())
    assert (result.resumed_from, result.steps) == (saved, saved + 1)
