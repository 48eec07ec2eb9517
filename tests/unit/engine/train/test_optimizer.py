"""Learning rates and optimizers."""

import pytest
import torch
from torch import nn

from opensora_cli.engine.train.optimizer import KernelMuon, build_optimizers, load_moments, rate_factor, set_rates
from opensora_cli.settings.train import OptimizerSettings


class Convolutions(nn.Module):
    """A kernel and a matrix inside a block, both with biases, and a matrix outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.ModuleList([nn.Conv3d(2, 4, (3, 2, 2)), nn.Linear(4, 3)])
        self.out = nn.Linear(3, 1)

    def forward(self, clip: torch.Tensor) -> torch.Tensor:
        return self.out(self.block[1](self.block[0](clip).mean(dim=(2, 3, 4)))).square().mean()


def clip() -> torch.Tensor:
    return torch.randn(2, 2, 4, 4, 4, generator=torch.Generator().manual_seed(1))


class TestRateFactor:
    def test_up_level_and_down_to_zero(self):
        factors = [rate_factor(step, steps=10, warmup_steps=4, decay_steps=3) for step in range(11)]
        assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0])

    def test_level_without_warmup_and_decay(self):
        assert [rate_factor(step, steps=3, warmup_steps=0, decay_steps=0) for step in range(3)] == [1.0, 1.0, 1.0]

    def test_warmup_and_decay_that_overlap(self):
        factors = [rate_factor(step, steps=4, warmup_steps=4, decay_steps=4) for step in range(4)]
        assert factors == pytest.approx([0.25, 0.5, 0.5, 0.25])


class TestBuildOptimizers:
    def test_adamw_takes_all(self):
        module = Convolutions()
        (adamw,) = build_optimizers(module, OptimizerSettings(name="adamw"))
        assert [id(weight) for weight in adamw.param_groups[0]["params"]] == [id(w) for w in module.parameters()]

    def test_muon_takes_matrices_and_kernels_of_blocks(self):
        module = Convolutions()
        adamw, muon = build_optimizers(module, OptimizerSettings(name="muon"))
        ours = {id(weight): name for name, weight in module.named_parameters()}
        assert {ours[id(weight)] for weight in muon._weights} == {"block.0.weight", "block.1.weight"}
        assert {ours[id(weight)] for weight in adamw.param_groups[0]["params"]} == {
            "block.0.bias",
            "block.1.bias",
            "out.weight",
            "out.bias",
        }

    def test_frozen_weights_are_left_out(self):
        module = Convolutions()
        module.block.requires_grad_(False)
        (adamw,) = build_optimizers(module, OptimizerSettings(name="muon"))
        assert len(adamw.param_groups[0]["params"]) == 2

    def test_rates_are_shares_of_the_plateau(self):
        optimizers = build_optimizers(
            Convolutions(), OptimizerSettings(name="muon", learning_rate=1e-2, muon_learning_rate=4e-2)
        )
        for factor in (0.5, 0.25):
            set_rates(optimizers, factor)
            assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [1e-2 * factor, 4e-2 * factor]

    def test_loading_keeps_the_rates_of_this_run(self):
        (saved,) = build_optimizers(Convolutions(), OptimizerSettings(learning_rate=1e-2, beta1=0.5))
        module = Convolutions()
        (fresh,) = build_optimizers(module, OptimizerSettings(learning_rate=1e-3, beta1=0.7))
        state = saved.state_dict()
        state["state"] = {
            index: {"step": torch.tensor(3.0), "exp_avg": weight + 1, "exp_avg_sq": weight + 2}
            for index, weight in enumerate(module.state_dict().values())
        }
        load_moments(fresh, state)
        set_rates([fresh], 1.0)
        group = fresh.param_groups[0]
        assert (group["lr"], group["betas"]) == (1e-3, (0.7, 0.98))
        assert torch.equal(fresh.state[module.out.bias]["exp_avg"], module.out.bias + 1)


class TestKernelMuon:
    def test_kernels_move_downhill_by_orthogonal_updates(self):
        module = Convolutions()
        kernel = module.block[0].weight
        muon = KernelMuon([kernel, module.block[1].weight], learning_rate=0.02, weight_decay=0.0)
        before, loss_before = kernel.detach().clone(), module(clip())
        loss_before.backward()
        muon.step()
        update = (kernel - before).detach().flatten(1)
        assert kernel.shape == before.shape
        assert module(clip()) < loss_before
        # All directions of the update are about as long, which no gradient of such a loss has by itself.
        lengths = torch.linalg.svdvals(update)
        assert lengths.min() > 0.4 * lengths.max()
        assert (
            torch.linalg.svdvals(kernel.grad.flatten(1)).min()
            < 0.2 * torch.linalg.svdvals(kernel.grad.flatten(1)).max()
        )

    def test_a_kernel_is_a_matrix_of_outputs_by_the_rest(self):
        module = Convolutions()
        kernel, matrix = module.block[0].weight, nn.Parameter(module.block[0].weight.detach().flatten(1).clone())
        of_kernel = KernelMuon([kernel], learning_rate=0.02, weight_decay=0.1)
        of_matrix = torch.optim.Muon([matrix], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        for seed in range(3):
            kernel.grad = torch.randn(kernel.shape, generator=torch.Generator().manual_seed(seed))
            matrix.grad = kernel.grad.flatten(1)
            of_kernel.step()
            of_matrix.step()
        assert torch.equal(kernel.flatten(1), matrix)

    def test_a_weight_without_gradient_stays(self):
        module = Convolutions()
        kernel = module.block[0].weight
        before = kernel.detach().clone()
        KernelMuon([kernel], learning_rate=0.02, weight_decay=0.0).step()
        assert torch.equal(kernel, before)

    def test_zero_grad_forgets_the_gradients_of_the_weights(self):
        module = Convolutions()
        muon = KernelMuon([module.block[0].weight], learning_rate=0.02, weight_decay=0.0)
        module(clip()).backward()
        muon.zero_grad()
        assert module.block[0].weight.grad is None
