"""Findings about machines that are made up."""

from dataclasses import replace

import pytest

from opensora_cli.core.device_facts import DriverFacts, GpuFacts, TorchFacts
from opensora_cli.engine.env_check import machine
from opensora_cli.engine.env_check.machine import (
    WeightFacts,
    check_disk,
    check_encoder,
    check_gpus,
    check_links,
    check_memory,
    check_python,
    check_shared_memory,
    check_torch,
    read_weights,
)
from opensora_cli.engine.env_check.report import Severity

GIB = 2**30
TORCH = TorchFacts(
    version="2.13.0+cu130",
    cuda="13.0",
    cuda_available=True,
    nccl="2.28.9",
    cudnn="9.13.0",
)
CPU_TORCH = TorchFacts(version="2.13.0+cpu")
DRIVER = DriverFacts(version="580.95.05", gpus=("NVIDIA GeForce RTX 4090",))
GPU = GpuFacts(index=0, name="NVIDIA GeForce RTX 4090", capability=(8, 9), total_bytes=24 * GIB, free_bytes=23 * GIB)
NO_CUDA = replace(TORCH, cuda_available=False)
OLD_DRIVER = replace(DRIVER, version="550.54.15")
BROKEN_DRIVER = DriverFacts(failure="Failed to initialize NVML: Driver/library version mismatch")
WEIGHTS = WeightFacts(
    missing=("transformer",), missing_bytes=24 * GIB, largest_bytes=24 * GIB, folder="/w", free_disk_bytes=100 * GIB
)
OK, NOTE, WARNING, PROBLEM = Severity.OK, Severity.NOTE, Severity.WARNING, Severity.PROBLEM


def severities(findings):
    return [finding.severity for finding in findings]


def test_nothing_is_wrong_with_a_desktop():
    findings = [
        *check_python((3, 12, 1)),
        *check_torch(TORCH, DRIVER),
        *check_torch(replace(TORCH, cuda="12.8"), OLD_DRIVER),
        *check_gpus(TORCH, [GPU]),
        *check_links([]),
        *check_memory(WEIGHTS, has_gpus=False),
        *check_disk(WEIGHTS),
        *check_disk(replace(WEIGHTS, missing=(), missing_bytes=0, free_disk_bytes=0)),
        *check_shared_memory("nowhere"),
        *check_encoder(),
    ]
    assert set(severities(findings)) == {OK}


@pytest.mark.parametrize(
    ("findings", "severity", "message", "fix"),
    [
        (check_python((3, 14, 0)), WARNING, "Python 3.14.0", "use 3.13"),
        (check_torch(CPU_TORCH, DRIVER), PROBLEM, "and here is NVIDIA GeForce RTX 4090", "CUDA 13.x"),
        (check_torch(NO_CUDA, OLD_DRIVER), PROBLEM, "driver 550.54.15 is too old for CUDA 13.0", "CUDA 12.x"),
        (check_torch(NO_CUDA, DRIVER), PROBLEM, "torch can use no GPU", "unset CUDA_VISIBLE_DEVICES"),
        (check_torch(NO_CUDA, DriverFacts()), WARNING, "no NVIDIA driver was found", "--gpus all"),
        (check_torch(NO_CUDA, BROKEN_DRIVER), PROBLEM, "version mismatch", "restart"),
        (check_torch(CPU_TORCH, BROKEN_DRIVER), PROBLEM, "version mismatch", "restart"),
        (check_gpus(TORCH, [replace(GPU, failure="no kernel image")]), PROBLEM, "cannot compute", "pytorch.org"),
        (check_gpus(TORCH, [replace(GPU, is_mig=True)]), WARNING, "a MIG slice", "nvidia-smi -mig 0"),
        (check_gpus(TORCH, [replace(GPU, free_bytes=11 * GIB)]), WARNING, "more than half full", "nvidia-smi"),
        (check_gpus(TORCH, [replace(GPU, capability=(7, 5))]), WARNING, "no bfloat16", "--dtype float16"),
        (check_memory(replace(WEIGHTS, largest_bytes=2**60), has_gpus=True), WARNING, "host memory free", "add memory"),
        (check_disk(replace(WEIGHTS, free_disk_bytes=GIB)), WARNING, "1.0 GiB free for /w", "--to DIR"),
    ],
)  # fmt: skip
def test_a_fault_is_found_with_reason_and_fix(findings, severity, message, fix):
    (found,) = [finding for finding in findings if finding.severity not in (OK, NOTE)]
    assert found.severity is severity
    assert message in found.message
    assert fix in found.fix
    assert found.why


def test_the_shared_memory_of_a_container_is_small(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_SMALLEST_SHARED_MEMORY", 2**62)
    (found,) = check_shared_memory(str(tmp_path))
    assert found.severity is WARNING
    assert "--shm-size" in found.fix


def test_weights_go_to_the_folder_that_the_environment_names(tmp_path):
    weights = read_weights({"OSORA_WEIGHTS": str(tmp_path / "not" / "yet")})
    assert weights.folder == str(tmp_path / "not" / "yet")
    assert weights.missing == ("transformer", "vae", "t5", "clip")
    assert weights.missing_bytes > weights.largest_bytes > 20 * GIB
    assert weights.free_disk_bytes > 0
