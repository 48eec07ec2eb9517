"""The benchmark for a GPU, run with tiny sizes on the CPU: every part, what is skipped, and what fails."""

import json
from pathlib import Path

import gpu
import pytest
import torch

CPU = ["--tiny", "--device", "cpu"]
FAIL_ON_A_CPU = {"settings": ["fp8 products", "int8 products", "compiled, fp8 products"]}


@pytest.fixture(autouse=True)
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def figures(tmp_path: Path, *arguments: str) -> dict:
    """Return what a call has written, part by part."""
    out = tmp_path / "gpu.json"
    gpu.main([*CPU, "--out", str(out), *arguments])
    document = json.loads(out.read_text())
    assert document["schema"] == "osora.bench.gpu/2"
    return {part["part"]: part for part in document["parts"]}


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    parts = figures(tmp_path)
    assert list(parts) == list(gpu.PARTS)
    assert {name: part["reason"] for name, part in parts.items() if part["status"] != "done"} == {}
    for name, part in parts.items():
        assert part["rows"], name
        failed = [row["what"] for row in part["rows"] if "failed" in row]
        # What GPUs alone have.
        assert name == "rates" or failed == FAIL_ON_A_CPU.get(name, []), name
