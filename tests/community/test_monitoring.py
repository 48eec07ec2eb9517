"""Names of monitoring, called as the community calls them."""

import logging

import pytest
import torch
from torch import nn

from opensora_cli.community.monitoring import (
    AccelerationProfiler,
    create_tensorboard_writer,
    format_numel_str,
    get_model_numel,
    log_cuda_max_memory,
    log_cuda_memory,
    log_model_params,
    monitor_gpu_memory,
    profile_model_performance,
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="reports what there is without CUDA")
def test_memory_is_logged_with_its_stage(caplog):
    caplog.set_level(logging.INFO)
    log_cuda_memory("diffusion")
    log_cuda_max_memory()
    assert caplog.messages == [
        "CUDA memory at diffusion: there is no CUDA device",
        "most CUDA memory: there is no CUDA device",
    ]
    assert monitor_gpu_memory() is None


def test_shared_parameters_are_logged_once(caplog):
    caplog.set_level(logging.INFO)
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].weight = model[0].weight
    model.append(nn.Linear(10, 5, bias=False).requires_grad_(False))
    log_model_params(model)
    assert caplog.messages == ["Sequential: 150 parameters, 100 of them trained, 0.000 GiB"]


def test_parameters_are_counted_in_powers_of_1024():
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1).requires_grad_(False))
    assert get_model_numel(model) == (13, 10)
    counts = (11_000_000_000, 2**20, 1536, 7)
    assert [format_numel_str(count) for count in counts] == ["10.24 B", "1.00 M", "1.50 K", "7"]


def test_tensorboard_has_a_folder_of_its_own(tmp_path):
    pytest.importorskip("tensorboard")
    writer = create_tensorboard_writer(str(tmp_path))
    writer.add_scalar("loss", 1.0, 0)
    writer.close()
    assert len(list((tmp_path / "tensorboard").glob("events.*"))) == 1


def test_calls_are_measured_and_reported():
    profiler = AccelerationProfiler()

    def exchange(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        return x * factor

    assert profiler.profile_checkpoint(torch.ones, 1000).sum() == 1000
    assert profiler.profile_communication(exchange, torch.ones(3), factor=2).sum() == 6
    report = profiler.generate_report()
    assert {name: list(figures) for name, figures in report.items()} == {
        "timing_breakdown": ["checkpoint"],
        "memory_breakdown": ["checkpoint"],
        "communication_breakdown": ["exchange"],
    }
    assert report["memory_breakdown"]["checkpoint"] == 4000
    assert report["timing_breakdown"]["checkpoint"] > 0


def test_a_model_is_timed_after_a_warm_up():
    calls = []
    model = nn.Identity()
    model.register_forward_hook(lambda *_: calls.append(1))
    mean, std = profile_model_performance(model, torch.ones(2), num_runs=3)
    assert mean > 0
    assert std >= 0
    assert len(calls) == 4
