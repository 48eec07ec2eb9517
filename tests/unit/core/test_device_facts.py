"""Facts about GPUs, on a faked torch and nvidia-ml-py."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from opensora_cli.core import device_facts
from opensora_cli.core.device_facts import LinkFacts, LinkKind

GIB = 2**30


class FakeNvml(ModuleType):
    """Two GPUs, which NVML knows by their ids."""

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVMLError = RuntimeError

    def __init__(self, nvlinked):
        super().__init__("pynvml")
        self.__spec__ = ModuleSpec("pynvml", None)
        self.nvlinked = nvlinked
        self.sessions = 0

    def nvmlInit(self):  # noqa: N802
        self.sessions += 1

    def nvmlShutdown(self):  # noqa: N802
        self.sessions -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        assert uuid in ("GPU-a", "GPU-b")
        return uuid

    def nvmlDeviceGetP2PStatus(self, first, second, index):  # noqa: N802
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if {first, second} <= self.nvlinked else 1


@pytest.fixture
def two_gpus(monkeypatch):
    names = ["NVIDIA H100", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"]
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "mem_get_info": lambda index: (70 * GIB, 80 * GIB),
        "get_device_name": names.__getitem__,
        "get_device_capability": lambda index: (9, 0),
        "get_device_properties": lambda index: SimpleNamespace(uuid="ab"[index]),
        "can_device_access_peer": lambda first, second: True,
        "get_arch_list": lambda: ["sm_90"],
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(device_facts, "_failure_of", lambda index: None)


def test_nccl_of_a_cuda_build_is_there_without_a_driver(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    facts = device_facts.read_torch()
    assert (facts.cuda, facts.cuda_available, facts.nccl, facts.cudnn) == ("13.0", False, "2.28.9", "9.19.0")


def test_facts_of_gpus(two_gpus):
    first, second = device_facts.read_gpus()
    assert (first.index, first.name, first.capability) == (0, "NVIDIA H100", (9, 0))
    assert (first.free_bytes, first.total_bytes) == (70 * GIB, 80 * GIB)
    assert (first.is_mig, second.is_mig) == (False, True)


@pytest.mark.parametrize(("nvlinked", "kind"), [({"GPU-a", "GPU-b"}, LinkKind.NVLINK), (set(), LinkKind.PEER)])
def test_links(two_gpus, monkeypatch, nvlinked, kind):
    nvml = FakeNvml(nvlinked)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert device_facts.read_links(device_facts.read_gpus()) == (LinkFacts(0, 1, kind),)
    assert nvml.sessions == 0
