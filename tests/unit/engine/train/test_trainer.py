"""The trainer, on a toy: what a step does, what it leaves alone, and what does not matter."""

import math

import pytest
import torch
from closeness import assert_close
from torch import nn
from toy_training import ADAMW, MUON, ToyModule, ToyTask, draw, toy_trainer

from opensora_cli.core.exceptions import TrainingError
from opensora_cli.data.batches import SampleRng, Stream
from opensora_cli.engine.train.optimizer import averaged_copy, update_ema
from opensora_cli.engine.train.trainer import PARTS


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.named_parameters()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


class TestUpdateEma:
    def test_the_average_moves_towards_the_weights(self):
        averaged, module = averaged_copy(ToyModule()), ToyModule()
        with torch.no_grad():
            module.block.weight.mul_(3.0)
        expected = 0.75 * averaged["block.weight"] + 0.25 * module.block.weight
        update_ema(averaged, module, decay=0.75)
        assert_close(averaged["block.weight"], expected)
        assert torch.equal(averaged["out.weight"], module.out.weight)
        assert "calls" not in averaged

    def test_a_weight_in_two_places_counts_once(self):
        def tied(value: float) -> nn.ModuleList:
            layers = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
            layers[1].weight = layers[0].weight
            nn.init.constant_(layers[0].weight, value)
            return layers

        averaged = averaged_copy(tied(1.0))
        update_ema(averaged, tied(2.0), decay=0.75)
        assert averaged.keys() == {"0.weight"}
        assert torch.equal(averaged["0.weight"], torch.full((2, 2), 1.25))

    def test_frozen_weights_are_left_out(self):
        module = ToyModule()
        module.block.requires_grad_(False)
        assert averaged_copy(module, trained_only=True).keys() == {"out.weight", "out.bias"}


class TestStep:
    def test_report(self):
        task = ToyTask()
        report = toy_trainer(task, micro_batches=3).do_step()
        assert (report.step, report.epoch, report.skipped) == (1, 0, False)
        assert list(report.figures) == ["loss", "grad_norm", "scale"]
        assert (report.samples, report.tokens) == (3, 120)
        assert report.paths == ("toy0.mp4", "toy1.mp4", "toy2.mp4")
        assert set(report.seconds) <= {*PARTS, "total"}
        assert {"data", "forward", "backward", "optimizer", "total"} <= report.seconds.keys()

    def test_gradient_is_the_mean_over_micro_batches(self):
        task, module = ToyTask(), ToyModule()
        trainer = toy_trainer(task, micro_batches=4)
        norm = trainer.do_step().figures["grad_norm"]
        noiseless = [draw(SampleRng.of(0, number, Stream.DATA), number).x_BC for number in range(4)]
        noisy = [
            x_BC + 0.01 * torch.randn(x_BC.shape, generator=_drawn_once(SampleRng.of(0, number)).torch)
            for number, x_BC in enumerate(noiseless)
        ]
        answers = module(torch.cat(noisy))
        (answers - torch.cat(noiseless).sum(dim=1, keepdim=True)).square().mean().backward()
        expected = math.sqrt(sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None))
        assert norm == pytest.approx(expected, rel=1e-5)

    def test_chance_is_of_seed_and_number_alone(self):
        one, other, third = ToyTask(), ToyTask(), ToyTask()
        for task, loop in ((one, {"micro_batches": 2}), (other, {}), (third, {"seed": 1})):
            trainer = toy_trainer(task, **loop)
            for _ in range(2 if "micro_batches" in loop else 4):
                trainer.do_step()
        assert one.asked == other.asked == [0, 1, 2, 3]
        assert one.sampled == other.sampled
        assert one.sampled != third.sampled
        assert len(set(one.sampled)) == 4
        # Data and loss have independent streams.
        assert SampleRng.of(0, 1).numpy.uniform() != SampleRng.of(0, 1, Stream.DATA).numpy.uniform()

    def test_layers_draw_by_the_micro_batch_alone(self):
        sampled = []
        for disturbed in (False, True):
            task = ToyTask()
            task.module.register_forward_hook(lambda *_: sampled.append(float(torch.rand(()))))
            trainer = toy_trainer(task)
            for _ in range(2):
                if disturbed:
                    torch.rand(7)
                trainer.do_step()
        assert sampled[:2] == sampled[2:]
        assert sampled[0] != sampled[1]

    def test_average_starts_with_few_steps(self):
        task = ToyTask()
        trainer = toy_trainer(task, ema_decay=0.999)
        first = task.module.out.weight.detach().clone()
        trainer.do_step()
        assert_close(trainer.ema["out.weight"], 0.1 * first + 0.9 * task.module.out.weight)
        assert not torch.equal(first, task.module.out.weight)

    @pytest.mark.parametrize("decay", [0.9, None])
    def test_the_average_takes_the_weights_place_for_a_while(self, decay):
        task = ToyTask()
        trainer = toy_trainer(task, ema_decay=decay)
        trainer.do_step()
        assert (trainer.ema is None) is (decay is None)
        before = weights(task.module)
        average = {name: value.clone() for name, value in (trainer.ema or before).items()}
        with trainer.averaged():
            assert_same(weights(task.module), {name: average[name] for name in before})
        assert_same(weights(task.module), before)
        assert_same(trainer.ema or before, average)

    def test_rates_follow_the_schedule(self):
        trainer = toy_trainer(ToyTask(), steps=6, optimizer=ADAMW)
        rates = [trainer.do_step().learning_rate for _ in range(6)]
        assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 1e-3, 5e-4])


def _drawn_once(rng: SampleRng) -> SampleRng:
    rng.numpy.uniform()
    return rng


class TestNotFinite:
    @pytest.mark.parametrize("wrong", [{"not_finite": (3,)}, {"steep": (3,)}], ids=["loss", "gradient"])
    def test_a_step_is_skipped_and_changes_nothing(self, wrong: dict[str, tuple[int, ...]]):
        task = ToyTask(**wrong)
        trainer = toy_trainer(task, micro_batches=2, optimizer=MUON)
        trainer.do_step()
        before, average = weights(task.module), {name: value.clone() for name, value in (trainer.ema or {}).items()}
        report = trainer.do_step()
        assert report.skipped
        assert report.figures == {}
        assert_same(weights(task.module), before)
        assert_same(trainer.ema or {}, average)
        # The loss tells which of the two it was; a gradient does not.
        assert report.paths == (("toy3.mp4",) if "not_finite" in wrong else ("toy2.mp4", "toy3.mp4"))
        assert not trainer.do_step().skipped
        assert trainer.skipped_in_a_row == 0
        assert trainer.step == 3

    def test_five_in_a_row_end_the_run(self):
        trainer = toy_trainer(ToyTask(not_finite=(0, 1, 2, 3, *range(5, 12))), steps=12)
        assert [trainer.do_step().skipped for _ in range(9)] == [True] * 4 + [False] + [True] * 4
        trainer.raise_if_stuck()
        trainer.do_step()
        with pytest.raises(TrainingError, match="not finite 5 steps in a row, up to step 10") as caught:
            trainer.raise_if_stuck()
        assert "learning_rate" in str(caught.value.hint)
        assert trainer.are_weights_finite()

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    def test_weights_and_averages_are_checked(self, value):
        for where in ("weights", "average"):
            trainer = toy_trainer(ToyTask())
            assert trainer.are_weights_finite()
            held = trainer.ema if where == "average" else dict(trainer.task.module.named_parameters())
            with torch.no_grad():
                held["out.weight"][0, 1] = value
            assert not trainer.are_weights_finite()


class TestAdversary:
    def test_learns_with_its_own_optimizer(self):
        task = ToyTask(opposed_from=0)
        adversary = task.roles["adversary"].module
        before, own = weights(adversary), weights(task.module)
        trainer = toy_trainer(task, micro_batches=2)
        report = trainer.do_step()
        assert list(report.figures)[:4] == ["loss", "adversary_loss", "grad_norm", "adversary_grad_norm"]
        assert report.figures["opposed"] == 1.0
        moved = weights(adversary)
        # AdamW's first update is the rate, whatever the gradient is, and weight decay.
        for name in moved:
            assert (moved[name] - before[name]).abs().item() == pytest.approx(0.1, rel=0.1)
        assert (weights(task.module)["out.bias"] - own["out.bias"]).abs().item() == pytest.approx(1e-3 / 3, rel=0.01)
