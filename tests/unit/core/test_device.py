from types import SimpleNamespace

import pytest
import torch

from opensora_cli.core import device
from opensora_cli.core.exceptions import HardwareError


def accelerator(**functions):
    return SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, **functions)


def test_a_type_that_torch_lacks_is_refused_with_the_reason():
    with pytest.raises(HardwareError, match=r"npu is not there: torch .* finds none"):
        device.pick_device("npu")


def test_an_accelerator_of_another_vendor_is_accepted_by_name(monkeypatch):
    monkeypatch.setattr(torch, "xpu", accelerator())
    assert device.pick_device("xpu:1") == torch.device("xpu", 1)
    with pytest.raises(HardwareError, match="this machine has xpu:0, xpu:1"):
        device.pick_device("xpu:2")


def test_cached_memory_of_the_allocator_counts_as_free(monkeypatch):
    functions = {"mem_get_info": (10, 100), "memory_reserved": 7, "memory_allocated": 3}
    for name, value in functions.items():
        monkeypatch.setattr(torch.xpu, name, lambda _, value=value: value)
    assert device.free_and_total_bytes(torch.device("xpu", 0)) == (14, 100)


def test_the_peak_of_a_cpu_is_that_of_the_process():
    cpu = torch.device("cpu")
    device.start_peak_memory(cpu)
    assert 0.05 < device.peak_memory_gib(cpu)["peak_resident_gib"] < 1000


def test_names_of_devices(monkeypatch):
    assert device.pick_device("cpu") == torch.device("cpu")
    assert device.device_name(torch.device("cpu")) == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(HardwareError, match=r"device=cuda is not there: .*(no usable|without CUDA)") as refused:
        device.pick_device("cuda")
    assert refused.value.hint.startswith("use --device cpu, or ")


def test_a_limit_of_memory_is_a_share_that_ends_with_the_block(monkeypatch):
    shares = [0.9]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: shares[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
    for limit, share in ((25, 0.25), (200, 1.0)):
        with device.limited_memory(torch.device("cuda", 0), limit):
            assert shares[-1] == share
        assert shares[-1] == 0.9
    with device.limited_memory(torch.device("cpu"), 25), device.limited_memory(torch.device("cuda", 0), None):
        assert len(shares) == 5
