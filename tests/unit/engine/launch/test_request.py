"""Requests that contradict themselves, or ask for more than there is, are refused before anything starts."""

from pathlib import Path

import pytest
import torch

from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.engine.launch.request import LaunchRequest


def request(**changes):
    return LaunchRequest(**{"gpus": 2, "device_type": "cpu", "log_dir": Path("logs"), **changes})


@pytest.fixture
def two_cards(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {'AB'[index]}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "gpus=0 must be at least 1"),
        ({"gpus": -3}, "gpus=-3 must be at least 1"),
        ({"nnodes": 0}, "nnodes=0 must be at least 1"),
        ({"node_rank": 1}, "node_rank=1 must be 0 to 0, since nnodes=1"),
        ({"nnodes": 2}, "nnodes=2 needs rdzv_endpoint"),
        ({"nnodes": 2, "rdzv_endpoint": "node0"}, "rdzv_endpoint='node0' must be host:port"),
        ({"nnodes": 2, "rdzv_endpoint": "node0:99999"}, "must be host:port"),
        ({"nnodes": 2, "rdzv_endpoint": ":29500"}, "must be host:port"),
        ({"nnodes": 2, "rdzv_endpoint": "node0:" + 5000 * "1"}, "must be host:port"),
        ({"nnodes": 2, "rdzv_endpoint": "node0:\u0661\u0662"}, "must be host:port"),
        ({"devices": (0, 1)}, "devices=0,1 picks cards, and the device is cpu"),
        ({"devices": (0, 0), "device_type": "cuda"}, "devices=0,0 must name each card once"),
        ({"devices": (0, -1), "device_type": "cuda"}, "must name each card once"),
        ({"devices": (0,), "device_type": "cuda"}, "devices=0 contradicts gpus=2"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        request(**changes).check()


def test_sound_ones_pass(two_cards):
    request().check()
    request(gpus=64).check()
    request(device_type="cuda").check()
    request(device_type="cuda", devices=(1, 0)).check()
    request(nnodes=2, node_rank=1, rdzv_endpoint="node0:29500").check()


def test_more_cards_than_there_are(two_cards):
    with pytest.raises(HardwareError, match=r"gpus=3, and this machine has 2: cuda:0 \(Card A\), cuda:1 \(Card B\)"):
        request(gpus=3, device_type="cuda").check()
    with pytest.raises(HardwareError, match=r"devices=0,2: there is no cuda:2, and this machine has 2"):
        request(devices=(0, 2), device_type="cuda").check()


def test_no_cards(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(HardwareError, match="gpus=1, and this machine has no usable NVIDIA card"):
        request(gpus=1, device_type="cuda").check()


@pytest.mark.parametrize(
    ("seen", "expected"), [(None, "0,2"), ("4,5,6,7", "4,6"), ("GPU-a, GPU-b, GPU-c", "GPU-a,GPU-c")]
)
def test_picked_cards(monkeypatch, seen, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert request(device_type="cuda", devices=(0, 2)).visible_devices() == expected
    assert request(device_type="cuda").visible_devices() is None


@pytest.mark.parametrize(("endpoint", "expected"), [("node0:29500", ("node0", 29500)), ("[fe80::1]:1", ("fe80::1", 1))])
def test_endpoint(endpoint, expected):
    assert request(rdzv_endpoint=endpoint).endpoint() == expected
