"""Learning rates and optimizers."""

import math
from unittest import mock

import pytest
import torch
from torch import nn

from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.optimizer import (
    KernelMuon,
    Learner,
    build_optimizers,
    orthogonalized,
    rate_factor,
)
from opensora_cli.settings.train_sections import OptimizerSettings


class Convolutions(nn.Module):
    """A kernel and a matrix inside a block, both with biases, and a matrix outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.ModuleList([nn.Conv3d(2, 4, (3, 2, 2)), nn.Linear(4, 3)])
        self.out = nn.Linear(3, 1)

    def forward(self, clip: torch.Tensor) -> torch.Tensor:
        return self.out(self.block[1](self.block[0](clip).mean(dim=(2, 3, 4)))).square().mean()


def optimizers_of(module: nn.Module, settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    return build_optimizers(trained, settings)


def clip() -> torch.Tensor:
    return torch.randn(2, 2, 4, 4, 4, generator=torch.Generator().manual_seed(1))


class TestBuildOptimizers:
    def test_muon_takes_matrices_and_kernels_of_blocks(self):
        module = Convolutions()
        adamw, muon = optimizers_of(module, OptimizerSettings(name="muon"))
        ours = {id(weight): name for name, weight in module.named_parameters()}
        assert {ours[id(weight)] for weight in muon.param_groups[0]["params"]} == {"block.0.weight", "block.1.weight"}
        assert {ours[id(weight)] for weight in adamw.param_groups[0]["params"]} == {
            "block.0.bias",
            "block.1.bias",
            "out.weight",
            "out.bias",
        }

    def test_rates_are_shares_of_the_plateau(self):
        settings = OptimizerSettings(name="muon", learning_rate=1e-2, muon_learning_rate=4e-2, warmup_steps=3)
        trained, alone = dict(Convolutions().named_parameters()), Distribution(torch.device("cpu"))
        learner = Learner(trained, settings, steps=10, distribution=alone)
        for step, factor in ((1, 0.5), (0, 0.25)):
            learner.set_rates(step)
            rates = [optimizer.param_groups[0]["lr"] for optimizer in learner.optimizers]
            assert rates == [1e-2 * factor, 4e-2 * factor]


class TestKernelMuon:
    @pytest.mark.parametrize("shape", [(4, 12), (12, 4)])
    def test_a_matrix_moves_as_with_the_muon_of_torch(self, shape):
        ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
        muon = KernelMuon([ours], learning_rate=0.02, weight_decay=0.1)
        of_torch = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for seed in range(3):
            ours.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            theirs.grad = ours.grad.clone()
            muon.step()
            of_torch.step()
        # That of torch is in bfloat16.
        moved, of_theirs = ours.detach() - 1, theirs.detach() - 1
        assert (moved - of_theirs).norm() < 0.03 * of_theirs.norm()

    def test_a_kernel_moves_as_its_matrix_and_a_weight_without_a_gradient_stays(self):
        kernel, matrix, idle = (nn.Parameter(torch.ones(shape)) for shape in ((4, 3, 2, 2), (4, 12), (4, 12)))
        muon = KernelMuon([kernel, idle, matrix], learning_rate=0.02, weight_decay=0.1)
        matrix.grad = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
        kernel.grad = matrix.grad.view(4, 3, 2, 2).clone()
        muon.step()
        assert torch.equal(kernel.flatten(1), matrix)
        assert torch.equal(idle, torch.ones(4, 12))

    @pytest.mark.parametrize("has_bf16", [True, False])
    def test_products_are_in_bfloat16_where_the_cpu_has_them(self, has_bf16):
        matrix = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
        with (
            mock.patch.object(torch.cpu, "_is_avx512_bf16_supported", return_value=has_bf16),
            mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=False),
        ):
            wide = orthogonalized(matrix)
        assert wide.dtype is (torch.bfloat16 if has_bf16 else torch.float32)
        lengths = torch.linalg.svdvals(wide.float())
        assert 0.6 < lengths.min() <= lengths.max() < 1.3


def factors(steps: int, **settings: object) -> list[float]:
    chosen = OptimizerSettings(learning_rate=1.0, **settings)
    return [rate_factor(chosen, update, steps=steps) for update in range(steps + 1)]


AFTER = [(1 + math.cos(math.pi * done / 8)) / 2 for done in range(9)]


@pytest.mark.parametrize(
    ("steps", "settings", "expected"),
    [
        (10, {"warmup_steps": 3, "decay_steps": 3}, [0.25, 0.5, 0.75, *[1] * 5, 2 / 3, 1 / 3, 0]),
        (3, {"warmup_steps": 0, "decay_steps": 0}, [1.0] * 4),
        # Both overlap.
        (4, {"warmup_steps": 4, "decay_steps": 4}, [0.2, 0.4, 0.5, 0.25, 0]),
        (10, {"schedule": "cosine", "warmup_steps": 2}, [1 / 3, 2 / 3, *AFTER]),
        # A warm-up longer than the run.
        (2, {"schedule": "cosine", "warmup_steps": 3}, [0.25, 0.5, 0.75]),
    ],
)
def test_the_rate_rises_stays_and_falls(steps, settings, expected):
    assert factors(steps, **settings) == pytest.approx(expected)
