"""A conversion that is killed leaves the old weights or the new ones, and its source as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

# In a process of its own: it forks, and counts what it writes.
KILLED = """
import json, shutil, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
import killing
from opensora_cli.engine.ckpt.convert import convert
from opensora_cli.settings.ckpt import ConvertSettings

folder, suffix = Path(sys.argv[1]), sys.argv[2]
source, target = folder / "source.safetensors", folder / f"target{suffix}"
save_file({f"layer.{i}": torch.full((40, 10), float(i)) for i in range(3)}, source)

def run(**changes):
    size = {} if suffix else {"shard_size": "1000"}
    values = {"source": str(source), "target": str(target), "overwrite": True, **size, **changes}
    convert(ConvertSettings.model_validate(values))

def fresh():
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    for left in folder.glob(".osora-*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    run(dtype="fp16")

run(dtype="bf16", rename=["layer.=new."])
new = killing.tree(target)
fresh()
states, begun = {"old": killing.tree(target), "new": new}, killing.tree(source)
found = []

def check():
    assert killing.tree(source) == begun
    now = killing.tree(target)
    found.append(next((name for name, state in states.items() if state == now), "broken"))

deaths = killing.kill_at_every_step(fresh, lambda: run(dtype="bf16", rename=["layer.=new."]), check)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".safetensors", ".pt"], ids=["folder", "safetensors", "torch"])
def test_at_every_step(suffix: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", KILLED, str(tmp_path), suffix]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 5
    assert found == ["old"] * found.count("old") + ["new"] * found.count("new")
    assert found[-1] == "new"
