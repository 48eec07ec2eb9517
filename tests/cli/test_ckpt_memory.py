"""Commands on checkpoints that are larger than the memory they may use: twice the largest tensor and 256 MB more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_weights import write_holes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SIDE = 2048
TENSOR_BYTES = 4 * SIDE * SIDE
TENSORS = 40

# What Python and torch take by themselves is measured, and does not count. Fails if the limit lets the whole file in.
LIMITED = """
import os, resource, sys
import torch
from opensora_cli.cli.app import main
from opensora_cli.engine.ckpt import convert, inspect, verify

torch.ones(1000, 1000).sum() + (torch.ones(1000, 1000) @ torch.ones(1000, 1000)).sum()
os.fsync = lambda descriptor: None
used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
limit = used + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
code = main(sys.argv[3:])
try:
    torch.ones(int(sys.argv[2]), dtype=torch.uint8)
except RuntimeError:
    sys.exit(code)
sys.exit("there is no limit")
"""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    write_holes(tmp_path / "large.safetensors", {f"layers.{index}.weight": [SIDE, SIDE] for index in range(TENSORS)})
    return tmp_path / "large.safetensors"


def run(*args: str, largest: int = TENSOR_BYTES, total: int = TENSORS * TENSOR_BYTES) -> str:
    """Run `osora ckpt` on tensors of so many bytes with little memory, and return what it prints."""
    limit = 2 * largest + 256 * 2**20
    assert 2 * limit < total
    command = [sys.executable, "-c", LIMITED, str(limit), str(total), "ckpt", *args, "--quiet"]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("form", ["dcp", "safetensors-shards"])
def test_convert(form: str, large: Path, tmp_path: Path) -> None:
    run("convert", str(large), str(tmp_path / "small"), "--dtype", "bf16", "--format", form)
    assert json.loads(run("inspect", str(tmp_path / "small"), "--json"))["dtypes"] == {"bfloat16": TENSORS * SIDE**2}


def test_merge_lora(large: Path, tmp_path: Path) -> None:
    rank = 64
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 1}))
    factors = {"A": torch.ones(rank, SIDE), "B": torch.ones(SIDE, rank)}
    names = [f"base_model.model.layers.{index}.lora" for index in range(TENSORS)]
    tensors = {f"{name}_{letter}.weight": each.clone() for name in names for letter, each in factors.items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    merged = tmp_path / "merged.safetensors"
    run("merge-lora", str(large), str(adapter), str(merged))
    with safe_open(merged, "pt") as file:
        assert all(bool((file.get_tensor(name) == 1).all()) for name in file.keys())  # noqa: SIM118


def test_layouts(tmp_path: Path) -> None:
    hidden, head, blocks = 1024, 128, 16
    block = {"linear1.weight": [7 * hidden, hidden], "linear2.weight": [hidden, 5 * hidden]}
    block |= {f"norm.{name}_norm.scale": [head] for name in ("query", "key")}
    shapes = {f"single_blocks.{index}.{name}": shape for index in range(blocks) for name, shape in block.items()}
    source, target = tmp_path / "fused.safetensors", tmp_path / "changed"
    write_holes(source, {"img_in.weight": [hidden, 64], **shapes})
    sizes = {"largest": 4 * 7 * hidden**2, "total": source.stat().st_size}
    run("convert", str(source), str(target), "--qkv", "split", **sizes)
    found = json.loads(run("inspect", str(target), "--json", **sizes))
    assert found["qkv"] == "split"
    assert len(found["tensors"]) > len(shapes) + 1
