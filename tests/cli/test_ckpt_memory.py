"""Commands on checkpoints that are larger than the memory they may use: twice the largest tensor and 256 MB more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
from opensora_cli.engine.ckpt import convert, diff, inspect, verify

torch.ones(1000, 1000).sum()
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
    """Square matrices, more of them than fit: a file with a hole for its data."""
    header = {
        f"layers.{index}.weight": {
            "dtype": "F32",
            "shape": [SIDE, SIDE],
            "data_offsets": [index * TENSOR_BYTES, (index + 1) * TENSOR_BYTES],
        }
        for index in range(TENSORS)
    }
    content = json.dumps(header).encode()
    with (tmp_path / "large.safetensors").open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + TENSORS * TENSOR_BYTES)
    return tmp_path / "large.safetensors"


def run(*args: str) -> str:
    """Run `osora ckpt` with little memory, and return what it prints."""
    limit = 2 * TENSOR_BYTES + 256 * 2**20
    assert 2 * limit < TENSORS * TENSOR_BYTES
    command = [sys.executable, "-c", LIMITED, str(limit), str(TENSORS * TENSOR_BYTES), "ckpt", *args, "--quiet"]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_statistics(large: Path) -> None:
    tensors = json.loads(run("inspect", str(large), "--stats", "--json"))["tensors"]
    assert len(tensors) == TENSORS
    assert all(tensor["statistics"]["all_zero"] for tensor in tensors)


def test_verify_and_diff(large: Path) -> None:
    assert "sound    all numbers are finite" in run("verify", str(large))
    assert run("diff", str(large), str(large)).startswith("equal")


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("form", ["safetensors-shards", "torch", "dcp"])
def test_convert(dtype: str, form: str, large: Path, tmp_path: Path) -> None:
    run("convert", str(large), str(tmp_path / "small"), "--dtype", dtype, "--format", form)
    dtypes = json.loads(run("inspect", str(tmp_path / "small"), "--json"))["dtypes"]
    name = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}[dtype]
    assert dtypes[name]["tensors"] == TENSORS
