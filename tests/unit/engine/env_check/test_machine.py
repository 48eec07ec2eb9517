"""Findings about machines that are made up."""

import re
from dataclasses import replace

import pytest

from opensora_cli.core.gpus import DriverFacts, GpuFacts, LinkFacts, LinkKind, TorchFacts
from opensora_cli.engine.env_check.facts import (
    BackendFacts,
    EncoderFacts,
    HostFacts,
    PythonFacts,
    WeightFacts,
    read_presets,
)
from opensora_cli.engine.env_check.host import (
    check_attention,
    check_disk,
    check_encoder,
    check_limits,
    check_memory,
    check_presets,
)
from opensora_cli.engine.env_check.machine import (
    check_gpus,
    check_libraries,
    check_links,
    check_precision,
    check_python,
    check_torch,
    is_supported,
)
from opensora_cli.engine.env_check.report import EnvReport, PresetNeeds, Severity, isolated
from opensora_cli.engine.generate.plan import make_plan

GIB = 2**30
TORCH = TorchFacts(
    version="2.13.0+cu130",
    cuda="13.0",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    cuda_available=True,
    nccl="2.28.9",
    cudnn="9.13.0",
)
CPU_TORCH = TorchFacts(version="2.13.0+cpu")
DRIVER = DriverFacts(version="580.95.05", gpus=("NVIDIA GeForce RTX 4090",))
GPU = GpuFacts(index=0, name="NVIDIA GeForce RTX 4090", capability=(8, 9), total_bytes=24 * GIB, free_bytes=23 * GIB)
SERVER_GPUS = tuple(
    GpuFacts(index=index, name="NVIDIA H100", capability=(9, 0), total_bytes=80 * GIB, free_bytes=79 * GIB)
    for index in range(8)
)
NVLINKS = tuple(LinkFacts(a, b, LinkKind.NVLINK) for a in range(8) for b in range(a + 1, 8))
HOST = HostFacts(cores=16, total_bytes=64 * GIB, available_bytes=60 * GIB, shared_memory_bytes=32 * GIB)
WEIGHTS = WeightFacts(
    missing=("transformer",), missing_bytes=24 * GIB, largest_bytes=24 * GIB, folder="/w", free_disk_bytes=100 * GIB
)
OK, NOTE, WARNING, PROBLEM, UNKNOWN = Severity.OK, Severity.NOTE, Severity.WARNING, Severity.PROBLEM, Severity.UNKNOWN


def severities(findings):
    return [finding.severity for finding in findings]


def worst(findings):
    (found,) = [finding for finding in findings if finding.severity not in (OK, NOTE)]
    assert found.why
    assert found.fix
    return found


class TestNothingWrong:
    def test_a_desktop_has_only_ok_and_notes(self):
        findings = [
            *check_python(PythonFacts(version=(3, 12, 1), executable="python")),
            *check_torch(TORCH, DRIVER),
            *check_gpus(TORCH, [GPU]),
            *check_links([]),
            *check_libraries(TORCH, [GPU]),
            *check_precision(TORCH, [GPU]),
            *check_memory(HOST, WEIGHTS, has_gpus=True),
            *check_disk(WEIGHTS),
            *check_limits(HOST),
            *check_encoder(EncoderFacts(av="18.0", has_x264=True)),
        ]
        assert set(severities(findings)) == {OK, NOTE}

    def test_a_server(self):
        findings = [*check_gpus(TORCH, SERVER_GPUS), *check_links(NVLINKS)]
        assert severities(findings) == [OK] * 9
        assert findings[-1].message == "NVLink between all 28 pairs"
        assert set(severities(check_libraries(TORCH, SERVER_GPUS))) == {OK}

    def test_a_cpu_machine_has_only_ok_and_notes(self):
        findings = [
            *check_torch(CPU_TORCH, DriverFacts()),
            *check_gpus(CPU_TORCH, []),
            *check_libraries(CPU_TORCH, []),
            *check_precision(CPU_TORCH, []),
        ]
        assert set(severities(findings)) == {OK, NOTE}


class TestTorch:
    def test_a_cpu_build_beside_a_gpu_is_a_problem(self):
        found = worst(check_torch(CPU_TORCH, DRIVER))
        assert found.severity is PROBLEM
        assert "NVIDIA GeForce RTX 4090" in found.message
        assert "CUDA 13.x" in found.fix

    def test_a_driver_that_is_too_old(self):
        old = DriverFacts(version="550.54.15", gpus=DRIVER.gpus)
        found = worst(check_torch(replace(TORCH, cuda_available=False), old))
        assert found.severity is PROBLEM
        assert found.message == "driver 550.54.15 is too old for CUDA 13.0"
        assert "CUDA 12.x" in found.fix
        assert set(severities(check_torch(replace(TORCH, cuda="12.8"), old))) == {OK}

    def test_hidden_gpus_are_a_problem(self):
        found = worst(check_torch(replace(TORCH, cuda_available=False), DRIVER))
        assert found.severity is PROBLEM
        assert "CUDA_VISIBLE_DEVICES" in found.fix

    def test_a_cuda_build_without_a_driver(self):
        assert worst(check_torch(replace(TORCH, cuda_available=False), DriverFacts())).severity is WARNING

    def test_a_driver_that_does_not_answer(self):
        broken = DriverFacts(failure="Failed to initialize NVML: Driver/library version mismatch")
        found = worst(check_torch(replace(TORCH, cuda_available=False), broken))
        assert found.severity is PROBLEM
        assert "version mismatch" in found.message
        assert worst(check_torch(CPU_TORCH, broken)) == found

    def test_versions_of_python_and_packages(self):
        assert worst(check_python(PythonFacts(version=(3, 10, 9), executable="x"))).severity is PROBLEM
        assert worst(check_python(PythonFacts(version=(3, 14, 0), executable="x"))).severity is WARNING
        unmet = PythonFacts(version=(3, 11, 0), executable="x", unmet=("av 17.0 does not fit >=18",))
        assert worst(check_python(unmet)).message == "av 17.0 does not fit >=18"


class TestGpus:
    @pytest.mark.parametrize(
        ("capability", "architectures", "supported"),
        [
            ((8, 9), ("sm_80",), True),
            ((8, 0), ("sm_86",), False),
            ((9, 0), ("sm_80",), False),
            ((9, 0), ("sm_80", "compute_80"), True),
            ((9, 0), ("sm_90a",), True),
            ((10, 3), ("sm_100a",), False),
            ((10, 3), ("sm_100f",), True),
            ((12, 0), ("sm_90", "compute_90a"), False),
            ((6, 1), ("sm_75", "compute_75"), False),
            ((9, 0), (), True),
        ],
    )
    def test_kernels_run_on_gpus_of_their_architecture(self, capability, architectures, supported):
        assert is_supported(capability, architectures) is supported

    def test_a_gpu_without_kernels_is_a_problem(self):
        old = replace(GPU, name="Tesla P100", capability=(6, 0))
        found = worst(check_gpus(TORCH, [old]))
        assert found.severity is PROBLEM
        assert "sm_60" in found.message

    def test_a_mig_slice(self):
        found = worst(check_gpus(TORCH, [replace(SERVER_GPUS[0], is_mig=True)]))
        assert found.severity is WARNING
        assert "MIG" in found.message

    def test_a_gpu_that_others_use_is_a_warning(self):
        assert "more than half full" in worst(check_gpus(TORCH, [replace(GPU, free_bytes=11 * GIB)])).message

    def test_links_of_several_kinds(self):
        links = [
            LinkFacts(0, 1, LinkKind.NVLINK),
            LinkFacts(0, 2, LinkKind.PEER),
            LinkFacts(1, 2, LinkKind.HOST),
        ]
        findings = list(check_links(links))
        assert [finding.message for finding in findings] == [
            "NVLink between 0-1",
            "PCI, card to card between 0-2",
            "no direct link between GPUs 1-2",
        ]
        assert findings[-1].severity is WARNING

    def test_only_several_gpus_need_nccl(self):
        assert worst(check_libraries(replace(TORCH, nccl=None), SERVER_GPUS)).severity is PROBLEM
        assert NOTE in severities(check_libraries(replace(TORCH, nccl=None), [GPU]))

    def test_gpus_without_bfloat16_are_a_warning(self):
        found = worst(check_precision(TORCH, [replace(GPU, capability=(7, 5))]))
        assert found.fix == "--dtype float16"


class TestHost:
    def test_free_memory_is_compared_with_the_weights(self):
        small = replace(HOST, available_bytes=16 * GIB)
        assert worst(check_memory(small, WEIGHTS, has_gpus=True)).severity is WARNING
        assert severities(check_memory(small, WEIGHTS, has_gpus=False)) == [OK]
        container = replace(HOST, container_limit_bytes=8 * GIB)
        findings = list(check_memory(container, WEIGHTS, has_gpus=True))
        assert severities(findings) == [NOTE, WARNING]
        assert "8.0 of 64.0 GiB" in findings[1].message.replace(" GiB of", " of")

    def test_free_disk_is_compared_with_missing_weights(self):
        assert worst(check_disk(replace(WEIGHTS, free_disk_bytes=GIB))).severity is WARNING
        assert severities(check_disk(replace(WEIGHTS, missing=(), missing_bytes=0, free_disk_bytes=0))) == [OK]

    def test_limits_of_shared_and_locked_memory(self):
        docker = replace(HOST, shared_memory_bytes=64 * 2**20)
        assert "--shm-size" in worst(check_limits(docker)).fix
        locked = replace(HOST, locked_memory_bytes=8 * 2**20)
        assert severities(check_limits(locked)) == [OK, OK]
        assert "memlock" in worst(check_limits(replace(locked, infiniband=("mlx5_0",)))).fix

    def test_a_missing_encoder_is_a_problem(self):
        assert worst(check_encoder(EncoderFacts(av="18.0", has_x264=False))).severity is PROBLEM

    def test_attention_backends_and_how_to_install_them(self):
        backends = [
            BackendFacts(name="sdpa", package="", in_registry=True),
            BackendFacts(name="flash2", package=None, in_registry=True),
            BackendFacts(name="flash3", package=None, in_registry=True),
            BackendFacts(name="xformers", package="0.0.35", in_registry=False),
        ]
        findings = list(check_attention(backends, [GPU]))
        assert severities(findings) == [OK, NOTE, NOTE, OK]
        assert "is used with its flash kernels" in findings[0].message
        assert (findings[1].message, findings[1].fix) == (
            "flash2 is not installed",
            "pip install flash-attn --no-build-isolation",
        )
        assert findings[2].message == "flash3 is not installed; no GPU here runs it"
        assert findings[3].message == "xformers 0.0.35 is installed; this version of osora does not use it"


class TestPresets:
    NEEDS = PresetNeeds(
        name="256px",
        video="336x192, 129 frames",
        device="cuda:0",
        dtype="bfloat16",
        stage="denoise",
        needed_bytes=11 * GIB + 1,
        free_bytes=23 * GIB,
        offload="blocks",
        has_weights=False,
        fits=True,
    )

    def test_the_table_rounds_needs_up(self):
        head, row = EnvReport.of([], presets=(self.NEEDS,), environment={}).lines()[1:3]
        assert head.split() == ["preset", "video", "device", "needs", "free", "fits", "offload", "weights"]
        assert re.split(r" {2,}", row) == [
            *("256px", "336x192, 129 frames", "cuda:0 bfloat16", "11.01 GiB (denoise)", "23.0 GiB", "yes", "blocks"),
            "missing",
        ]
        assert EnvReport.of([], presets=(), environment={}).lines() == ["", "all fine"]

    def test_nothing_fits(self):
        assert severities(check_presets([self.NEEDS])) == [OK]
        assert worst(check_presets([self.NEEDS.model_copy(update={"fits": False})])).severity is PROBLEM

    def test_the_demo_here(self, monkeypatch):
        monkeypatch.setattr("opensora_cli.engine.env_check.facts.list_presets", lambda kind: ["demo"])
        (demo,) = read_presets({}, make_plan)
        assert demo.has_weights
        assert demo.fits
        assert demo.needed_bytes > 10 * 2**20


def test_a_check_that_raises_is_a_finding():
    def check():
        raise RuntimeError("NVML\nis broken " + "x" * 1000)

    (finding,) = isolated("links", check)
    assert (finding.check, finding.severity) == ("links", UNKNOWN)
    assert finding.message.startswith("could not be checked: NVML is broken")
    assert len(finding.message) < 400
