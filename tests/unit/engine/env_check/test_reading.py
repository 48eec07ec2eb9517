"""Reading facts from torch and from nvidia-ml-py, both played by others."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from opensora_cli.engine.env_check import reading
from opensora_cli.engine.env_check.facts import DriverFacts, LinkFacts, LinkKind
from opensora_cli.engine.env_check.presets import preset_here

GIB = 2**30


class FakeNvml(ModuleType):
    """Two cards; NVML counts them in another order than CUDA, and knows them by their ids."""

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

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "580.95.05"

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return f"GPU-{'ba'[index]}"

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        assert uuid in ("GPU-a", "GPU-b")
        return uuid

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return f"card {handle}"

    def nvmlDeviceGetP2PStatus(self, first, second, index):  # noqa: N802
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if {first, second} <= self.nvlinked else 1


@pytest.fixture
def two_cards(monkeypatch):
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


def test_cards(two_cards):
    first, second = reading.read_cards()
    assert (first.index, first.name, first.capability) == (0, "NVIDIA H100", (9, 0))
    assert (first.free_bytes, first.total_bytes) == (70 * GIB, 80 * GIB)
    assert (first.is_mig, second.is_mig) == (False, True)


@pytest.mark.parametrize(("nvlinked", "kind"), [({"GPU-a", "GPU-b"}, LinkKind.NVLINK), (set(), LinkKind.PEER)])
def test_links(two_cards, monkeypatch, nvlinked, kind):
    nvml = FakeNvml(nvlinked)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert reading.read_links(reading.read_cards()) == (LinkFacts(0, 1, kind),)
    assert nvml.sessions == 0


def test_links_without_nvml(two_cards, monkeypatch):
    monkeypatch.setattr(reading, "_nvml", lambda: None)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: False)
    assert reading.read_links(reading.read_cards()) == (LinkFacts(0, 1, LinkKind.HOST),)


def test_driver(monkeypatch):
    nvml = FakeNvml(set())
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert reading.read_driver() == DriverFacts(version="580.95.05", cards=("card GPU-b", "card GPU-a"))
    assert nvml.sessions == 0


def test_a_machine_without_anything(monkeypatch):
    monkeypatch.setattr(reading, "_nvml", lambda: None)
    monkeypatch.setenv("PATH", "")
    assert reading.read_driver() == DriverFacts()
    if not torch.cuda.is_available():
        assert reading.read_cards() == ()
        assert reading.read_links(()) == ()


def test_versions_of_cudnn():
    assert reading._cudnn_version(91300) == "9.13.0"
    assert reading._cudnn_version(8902) == "8.9.2"


def test_what_osora_requires(monkeypatch):
    requires = ["torch>=2.11", "numpy>=99", "no-such-package>=1", "peft; extra == 'train'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requires)
    unmet = reading.read_python().unmet
    assert len(unmet) == 2
    assert unmet[0].endswith("does not fit >=99")
    assert unmet[1] == "no-such-package is not installed"


def test_weights_go_to_the_folder_that_is_named(tmp_path):
    facts = reading.read_weights({"OSORA_WEIGHTS": str(tmp_path / "not" / "yet")})
    assert facts.folder == str(tmp_path / "not" / "yet")
    assert facts.missing == ("transformer", "vae", "t5", "clip")
    assert facts.missing_bytes > facts.largest_bytes > 20 * GIB
    assert facts.free_disk_bytes > 0


def test_presets_find_weights_where_the_environment_says():
    assert preset_here("768px", {"OSORA_WEIGHTS": "/w"}).runtime.weights == "/w"
    assert preset_here("768px", {"OSORA_RUNTIME__WEIGHTS": "/w", "OSORA_WEIGHTS": ""}).runtime.weights == "/w"
    assert preset_here("768px", {}).runtime.weights is None
