"""A folder that another run is in is refused to several ranks as to one."""

import json
import os
import subprocess
import sys

import pytest
import tiny_training

from opensora_cli.core.folder_lock import LOCK_FILE, locked_folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
def test_all_ranks_end(tmp_path):
    run, path = tmp_path / "run", tmp_path / "settings.json"
    settings = tiny_training.text_settings(run).replace({"loop.micro_batches": 2})
    path.write_text(json.dumps(settings.model_dump(mode="json")))
    with locked_folder(run):
        done = subprocess.run(
            [sys.executable, "-m", "opensora_cli", "train", "--from", str(path), "--gpus", "2", "--device", "cpu"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert [each.name for each in run.iterdir()] == [LOCK_FILE]
    assert done.returncode == 3, done.stderr
    assert f"{run} is in use by another run: process {os.getpid()} on " in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
