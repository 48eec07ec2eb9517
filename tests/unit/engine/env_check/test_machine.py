"""Findings about machines that are made up."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from opensora_cli.core.device_facts import DriverFacts, GpuFacts, TorchFacts
from opensora_cli.engine.env_check import host
from opensora_cli.engine.env_check.host import (
    HostFacts,
    WeightFacts,
    check_disk,
    check_encoder,
    check_limits,
    check_memory,
    check_presets,
    preset_here,
    read_presets,
    read_weights,
)
from opensora_cli.engine.env_check.machine import (
    check_gpus,
    check_libraries,
    check_links,
    check_python,
    check_torch,
    is_supported,
    unmet_requirements,
)
from opensora_cli.engine.env_check.report import PresetNeeds, Severity
from opensora_cli.engine.estimate.offload import OffloadPlan, StageMemory
from opensora_cli.settings.layers import list_presets

GIB = 2**30
TORCH = TorchFacts(
    version="2.13.0+cu130",
    cuda="13.0",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    cuda_available=True,
    nccl="2.28.9",
    cudnn="9.13.0",
)
NEWER_TORCH = replace(TORCH, architectures=("sm_90", "compute_120"))
CPU_TORCH = TorchFacts(version="2.13.0+cpu")
DRIVER = DriverFacts(version="580.95.05", gpus=("NVIDIA GeForce RTX 4090",))
GPU = GpuFacts(index=0, name="NVIDIA GeForce RTX 4090", capability=(8, 9), total_bytes=24 * GIB, free_bytes=23 * GIB)
SERVER_GPUS = tuple(
    GpuFacts(index=index, name="NVIDIA H100", capability=(9, 0), total_bytes=80 * GIB, free_bytes=79 * GIB)
    for index in range(8)
)
HOST = HostFacts(cores=16, total_bytes=64 * GIB, available_bytes=60 * GIB, shared_memory_bytes=32 * GIB)
NO_CUDA = replace(TORCH, cuda_available=False)
OLD_DRIVER = replace(DRIVER, version="550.54.15")
BROKEN_DRIVER = DriverFacts(failure="Failed to initialize NVML: Driver/library version mismatch")
DOCKER = replace(HOST, shared_memory_bytes=64 * 2**20)
CONTAINER = replace(HOST, available_bytes=8 * GIB, container_limit_bytes=8 * GIB)
SMALL = replace(HOST, available_bytes=16 * GIB)
LOCKED = replace(HOST, locked_memory_bytes=8 * 2**20)
PYTHON = (3, 12, 1)
NEEDS = PresetNeeds(
    name="256px",
    video="336x192, 129 frames",
    needed_bytes=11 * GIB + 1,
    free_bytes=23 * GIB,
    offload="blocks",
    has_weights=False,
    fits=True,
)
WEIGHTS = WeightFacts(
    missing=("transformer",), missing_bytes=24 * GIB, largest_bytes=24 * GIB, folder="/w", free_disk_bytes=100 * GIB
)
OK, NOTE, WARNING, PROBLEM, UNKNOWN = Severity.OK, Severity.NOTE, Severity.WARNING, Severity.PROBLEM, Severity.UNKNOWN


def severities(findings):
    return [finding.severity for finding in findings]


def test_a_desktop_has_only_ok_and_notes():
    findings = [
        *check_python(PYTHON, []),
        *check_torch(TORCH, DRIVER),
        *check_torch(replace(TORCH, cuda="12.8"), OLD_DRIVER),
        *check_gpus(TORCH, [GPU]),
        *check_links([]),
        *check_libraries(TORCH, [GPU]),
        *check_libraries(replace(TORCH, nccl=None), [GPU]),
        *check_memory(HOST, WEIGHTS, has_gpus=True),
        *check_memory(SMALL, WEIGHTS, has_gpus=False),
        *check_disk(WEIGHTS),
        *check_disk(replace(WEIGHTS, missing=(), missing_bytes=0, free_disk_bytes=0)),
        *check_limits(HOST),
        *check_limits(LOCKED),
        *check_encoder(),
        *check_presets([NEEDS]),
        *check_presets([NEEDS], unplanned=("256px", "768px")),
    ]
    assert set(severities(findings)) == {OK, NOTE}


@pytest.mark.parametrize(
    ("findings", "severity", "message", "fix"),
    [
        (check_python((3, 10, 9), []), PROBLEM, "Python 3.10.9", "an environment with 3.11"),
        (check_python((3, 14, 0), []), WARNING, "Python 3.14.0", "use 3.13"),
        (check_python(PYTHON, ["av 17.0 does not fit >=18"]), PROBLEM, "av 17.0 does not fit", "pip"),
        (check_torch(CPU_TORCH, DRIVER), PROBLEM, "and here is NVIDIA GeForce RTX 4090", "CUDA 13.x"),
        (check_torch(NO_CUDA, OLD_DRIVER), PROBLEM, "driver 550.54.15 is too old for CUDA 13.0", "CUDA 12.x"),
        (check_torch(NO_CUDA, DRIVER), PROBLEM, "torch can use no GPU", "unset CUDA_VISIBLE_DEVICES"),
        (check_torch(NO_CUDA, DriverFacts()), WARNING, "no NVIDIA driver was found", "--gpus all"),
        (check_torch(NO_CUDA, BROKEN_DRIVER), PROBLEM, "version mismatch", "restart"),
        (check_torch(CPU_TORCH, BROKEN_DRIVER), PROBLEM, "version mismatch", "restart"),
        (check_gpus(NEWER_TORCH, [replace(GPU, capability=(8, 9))]), PROBLEM, "sm_89", "pytorch.org"),
        (check_gpus(TORCH, [replace(GPU, is_mig=True)]), WARNING, "a MIG slice", "nvidia-smi -mig 0"),
        (check_gpus(TORCH, [replace(GPU, free_bytes=11 * GIB)]), WARNING, "more than half full", "nvidia-smi"),
        (check_libraries(replace(TORCH, nccl=None), SERVER_GPUS), PROBLEM, "no NCCL", "WSL 2"),
        (check_libraries(replace(TORCH, cudnn=None), [GPU]), WARNING, "no cuDNN", "install torch again"),
        (check_gpus(TORCH, [replace(GPU, capability=(7, 5))]), WARNING, "no bfloat16", "--dtype float16"),
        (check_memory(SMALL, WEIGHTS, has_gpus=True), WARNING, "16.0 GiB of 64.0 GiB", "add memory"),
        (check_memory(CONTAINER, WEIGHTS, has_gpus=True), WARNING, "8.0 GiB of 64.0 GiB", "add memory"),
        (check_disk(replace(WEIGHTS, free_disk_bytes=GIB)), WARNING, "1.0 GiB free for /w", "--to DIR"),
        (check_limits(DOCKER), WARNING, "/dev/shm has 64 MiB", "--shm-size"),
        (check_limits(replace(LOCKED, infiniband=("mlx5_0",))), WARNING, "limited to 8 MiB", "memlock"),
        (check_presets([NEEDS.model_copy(update={"fits": False})]), PROBLEM, "no preset fits", "more memory"),
    ],
)  # fmt: skip
def test_a_fault_is_found_with_reason_and_fix(findings, severity, message, fix):
    (found,) = [finding for finding in findings if finding.severity not in (OK, NOTE)]
    assert found.severity is severity
    assert message in found.message
    assert fix in found.fix
    assert found.why


@pytest.mark.parametrize(
    ("capability", "architectures", "supported"),
    [
        ((8, 9), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_80", "compute_80"), True),
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100f",), True),
        ((12, 0), ("sm_90", "compute_90a"), False),
        ((9, 0), (), True),
    ],
)
def test_kernels_run_on_gpus_of_their_architecture(capability, architectures, supported):
    assert is_supported(capability, architectures) is supported


def test_requirements_that_are_missing_or_too_old(monkeypatch):
    requires = ["torch>=2.10", "numpy>=99", "no-such-package>=1", "peft; extra == 'train'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requires)
    first, second = unmet_requirements()
    assert first.endswith("does not fit >=99")
    assert second == "no-such-package is not installed"


def test_weights_go_to_the_folder_that_the_environment_names(tmp_path):
    weights = read_weights({"OSORA_WEIGHTS": str(tmp_path / "not" / "yet")})
    assert weights.folder == str(tmp_path / "not" / "yet")
    assert weights.missing == ("transformer", "vae", "t5", "clip")
    assert weights.missing_bytes > weights.largest_bytes > 20 * GIB
    assert weights.free_disk_bytes > 0
    assert preset_here("768px", {"OSORA_RUNTIME__WEIGHTS": "/w", "OSORA_WEIGHTS": ""}).runtime.weights == "/w"
    assert preset_here("768px", {}).runtime.weights is None


@pytest.mark.parametrize(("num_gpus", "planned"), [(0, ["demo"]), (1, list_presets("generate"))])
def test_presets_of_the_released_model_are_planned_where_there_is_a_gpu(num_gpus, planned, monkeypatch):
    def plan(settings):
        stage = StageMemory("denoise", GIB, 0)
        return SimpleNamespace(
            settings=settings, width=1, height=1, stages=(stage,), budget_bytes=GIB, offload=OffloadPlan(),
            weights=SimpleNamespace(missing={}),
        )  # fmt: skip

    monkeypatch.setattr(host, "make_plan", plan)
    presets, unplanned = read_presets({}, num_gpus=num_gpus)
    assert [preset.name for preset in presets] == planned
    notes = [finding for finding in check_presets(presets, unplanned=unplanned) if finding.severity is NOTE]
    assert [note.message.partition(" not planned")[0] for note in notes] == (
        [] if num_gpus else [", ".join(name for name in list_presets("generate") if name != "demo")]
    )
