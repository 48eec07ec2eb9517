"""AdamW whose moments are on the host."""

import pytest
import torch
from torch import nn

from opensora_cli.engine.train.offloaded_adamw import OffloadedAdamW

CHOICES = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-15, "weight_decay": 0.1}


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 30), (301,), (), (4, 3, 2, 2)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def fill_gradients(trained: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in trained:
        weight.grad = torch.randn(weight.shape, generator=generator)


class TestOffloadedAdamW:
    @pytest.mark.parametrize("piece", [16, 48, 256, 10_000])
    def test_equals_adamw_whatever_the_pieces(self, piece):
        plain, offloaded = weights(), weights()
        first = torch.optim.AdamW(plain, **CHOICES, fused=True)
        second = OffloadedAdamW([{"params": offloaded}], **CHOICES, piece=piece)
        for seed in range(4):
            for trained in (plain, offloaded):
                fill_gradients(trained, seed)
            plain[1].grad = offloaded[1].grad = plain[1].grad if seed % 2 else None
            first.step()
            second.step()
        for one, other in zip(plain, offloaded, strict=True):
            assert torch.equal(one, other)
            for name in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(first.state[one][name], second.state[other][name])
        assert [second.state[weight]["step"].item() for weight in offloaded] == [4, 2, 4, 4]

    def test_a_gradient_that_lies_otherwise(self):
        plain, offloaded = weights()[:1], weights()[:1]
        plain[0].grad = torch.arange(210.0).view(30, 7).t().contiguous()
        offloaded[0].grad = torch.arange(210.0).view(30, 7).t()
        torch.optim.AdamW(plain, **CHOICES, fused=True).step()
        OffloadedAdamW([{"params": offloaded}], **CHOICES, piece=32).step()
        assert torch.equal(plain[0], offloaded[0])

    def test_channels_last(self):
        results = []
        for kind in (torch.optim.AdamW, OffloadedAdamW):
            torch.manual_seed(0)
            convolution = nn.Conv3d(3, 4, 3).to(memory_format=torch.channels_last_3d)
            chosen = {**CHOICES, "fused": True} if kind is torch.optim.AdamW else {**CHOICES, "piece": 64}
            optimizer = kind([{"params": list(convolution.parameters())}], **chosen)
            for _ in range(2):
                fill_gradients(list(convolution.parameters()), seed=5)
                convolution.weight.grad = convolution.weight.grad.to(memory_format=torch.channels_last_3d)
                optimizer.step()
            results.append((convolution.weight, optimizer.state[convolution.weight]["exp_avg_sq"]))
        for expected, found in zip(*results, strict=True):
            assert torch.equal(expected, found)
            assert found.stride() == expected.stride() == (81, 1, 27, 9, 3)
