"""Optimizers and 8-bit products on a CUDA device."""

import pytest
import torch
from opensora_cli.engine.train.fp8_linear import Fp8TrainLinear, require_fp8
from torch import nn

from opensora_cli.engine.train.offloaded_adamw import OffloadedAdamW

CHOICES = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-15, "weight_decay": 0.1}


@pytest.mark.parametrize("piece", [64, 1000, 2**20])
def test_offloaded_adamw_equals_that_of_the_cpu(piece: int) -> None:
    results = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(n, 100, generator=generator).to(device)) for n in (3, 700, 41)]
        optimizer = OffloadedAdamW([{"params": weights}], **CHOICES, piece=piece)
        for _ in range(5):
            for weight in weights:
                # What the device computes must be done before it is fetched, and what comes back before it is used.
                weight.grad = torch.randn(weight.shape, generator=generator).to(device, non_blocking=True) * 2
            optimizer.step()
            with torch.no_grad():
                for weight in weights:
                    weight.mul_(0.5)
        results.append([weight.detach().cpu() for weight in weights])
        assert all(
            value.device.type == "cpu" and value.dtype == torch.float32
            for state in optimizer.state.values()
            for value in state.values()
        )
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_offloaded_adamw_takes_little_memory_of_the_device() -> None:
    weight = nn.Parameter(torch.zeros(64 * 2**20, device="cuda"))
    weight.grad = torch.ones_like(weight)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    OffloadedAdamW([{"params": [weight]}], **CHOICES).step()
    assert torch.cuda.max_memory_allocated() == before
    assert torch.equal(weight, torch.full_like(weight, weight[0].item()))


@pytest.mark.parametrize("rows", [128, 77])
def test_products_of_8_bits_are_near_exact_ones(rows: int) -> None:
    require_fp8(torch.device("cuda"))
    torch.manual_seed(0)
    linear = nn.Linear(256, 512, device="cuda")
    features = torch.randn(2, rows, 256, device="cuda")
    results = []
    for layer in (linear, Fp8TrainLinear(linear)):
        linear.zero_grad()
        given = features.clone().requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = layer(given)
        (output.float() * torch.arange(512.0, device="cuda")).sum().backward()
        assert output.dtype == torch.bfloat16
        results.append([output.float(), given.grad, linear.weight.grad.clone(), linear.bias.grad.clone()])
    errors = [float((b - a).norm() / a.norm()) for a, b in zip(*results, strict=True)]
    assert max(errors) < 0.1
    assert errors[0] > 1e-3
