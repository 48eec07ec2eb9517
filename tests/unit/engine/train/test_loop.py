"""The training loop, on a toy: what a step does, and that nothing is lost when a run ends early."""

import json
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from opensora_cli.core.exceptions import CheckpointError, OsoraError, OutputError, RequestError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.train.interrupts import uninterrupted
from opensora_cli.engine.train.loop import Chance, Trainer, update_ema
from opensora_cli.settings.train import LoopSettings, OptimizerSettings

MUON = OptimizerSettings(name="muon", warmup_steps=2, decay_steps=2, muon_learning_rate=1e-2)


class ToyModule(nn.Module):
    """Has a matrix for Muon and other weights for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Linear(3, 3)
        self.out = nn.Linear(3, 1)


class ToyTask:
    """Learns a linear function, with a new phase at step 2; can go wrong at chosen steps."""

    def __init__(self, *, not_finite: tuple[int, ...] = (), interrupt: int | None = None) -> None:
        self.module = ToyModule()
        self.asked: list[int] = []
        self._not_finite = not_finite
        self._interrupt = interrupt

    def begin_step(self, step: int, ema: ToyModule) -> None:
        if step == 2:
            with torch.no_grad():
                for module in (self.module, ema):
                    module.out.bias.fill_(0.5)

    def loss(self, step: int, chance: Chance) -> tuple[torch.Tensor, dict[str, float]]:
        self.asked.append(step)
        if step == self._interrupt:
            raise KeyboardInterrupt
        x = torch.randn(4, 3, generator=chance.generator) * float(chance.rng.uniform(0.5, 1.0))
        loss = (self.module.out(self.module.block(x)) - x.sum(dim=1, keepdim=True)).square().mean()
        return loss * (float("nan") if step in self._not_finite else 1.0), {"scale": float(x.std())}

    def export(self, ema: ToyModule, folder: Path) -> None:
        torch.save(ema.state_dict(), folder / "exported.pt")


class Listener(SilentReporter):
    """Remembers what is said."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.advanced = 0

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def advance(self, amount: int = 1) -> None:
        self.advanced += amount


def trainer(
    task: ToyTask, folder: Path, *, optimizer: OptimizerSettings = MUON, reporter: SilentReporter | None = None, **loop
) -> Trainer[ToyModule]:
    settings = LoopSettings(**{"steps": 4, "log_every": 1, "ema_decay": 0.9, "autocast_bf16": False, **loop})
    return Trainer(task, loop=settings, optimizer=optimizer, output=folder, reporter=reporter or SilentReporter())


def log(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds_per_step"} for line in lines]


def state(folder: Path) -> dict[str, object]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def assert_same(one: object, other: object) -> None:
    """Compare nested states, tensors bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        for ours, theirs in zip(one, other, strict=True):
            assert_same(ours, theirs)
    else:
        assert one == other


class TestUpdateEma:
    def test_formula(self):
        ema, module = ToyModule(), ToyModule()
        with torch.no_grad():
            module.block.weight.mul_(3.0)
        expected = 0.75 * ema.block.weight + 0.25 * module.block.weight
        update_ema(ema, module, decay=0.75)
        assert torch.allclose(ema.block.weight, expected)
        assert torch.equal(ema.out.weight, module.out.weight)

    def test_a_weight_in_two_places_counts_once(self):
        def tied(value: float) -> nn.ModuleList:
            layers = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
            layers[1].weight = layers[0].weight
            nn.init.constant_(layers[0].weight, value)
            return layers

        ema = tied(1.0)
        update_ema(ema, tied(2.0), decay=0.75)
        assert torch.equal(ema[1].weight, torch.full((2, 2), 1.25))

    def test_buffers_and_lower_precision(self):
        def normed(value: float) -> nn.Module:
            module = nn.BatchNorm1d(1)
            nn.init.constant_(module.running_mean, value)
            return module

        ema = normed(0.0)
        update_ema(ema, normed(1.0).to(torch.bfloat16), decay=0.5)
        assert ema.running_mean.item() == 0.5
        assert ema.running_mean.dtype == torch.float32


class TestUninterrupted:
    def test_an_interrupt_waits(self):
        done = []

        def work() -> None:
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                done.append("all of it")

        with pytest.raises(KeyboardInterrupt):
            work()
        assert done == ["all of it"]

    def test_the_handler_is_put_back(self):
        before = signal.getsignal(signal.SIGINT)
        with uninterrupted():
            assert signal.getsignal(signal.SIGINT) is not before
        assert signal.getsignal(signal.SIGINT) is before

    def test_an_error_is_not_covered_up(self):
        with pytest.raises(ZeroDivisionError), uninterrupted():
            raise ZeroDivisionError


class TestRun:
    def test_learns_logs_and_exports_the_average(self, tmp_path):
        reporter = Listener()
        running = trainer(ToyTask(), tmp_path, steps=60, log_every=20, reporter=reporter)
        running.run()
        lines = log(tmp_path)
        assert [line["step"] for line in lines] == [20, 40, 60]
        assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
        assert {"loss", "grad_norm", "scale", "learning_rate", "skipped"} <= lines[0].keys()
        assert reporter.advanced == 60
        assert_same(dict(torch.load(tmp_path / "exported.pt")), dict(running.ema.state_dict()))

    def test_average_starts_with_few_steps(self, tmp_path):
        task = ToyTask()
        running = trainer(task, tmp_path, steps=1, ema_decay=0.999)
        first = running.ema.out.weight.clone()
        running.run()
        assert torch.allclose(running.ema.out.weight, 0.1 * first + 0.9 * task.module.out.weight)
        assert not torch.equal(first, task.module.out.weight)

    def test_rates_follow_the_schedule(self, tmp_path):
        trainer(ToyTask(), tmp_path, steps=5).run()
        assert [line["learning_rate"] for line in log(tmp_path)] == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3, 5e-4])

    def test_chance_is_of_seed_and_step_alone(self, tmp_path):
        global_state = torch.get_rng_state()
        for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
            trainer(ToyTask(), tmp_path / folder, seed=seed).run()
        assert log(tmp_path / "a") == log(tmp_path / "b")
        assert log(tmp_path / "a")[0]["loss"] != log(tmp_path / "c")[0]["loss"]
        torch.manual_seed(0)
        ToyModule()  # all that the tasks above took from the global generator
        drawn = torch.get_rng_state()
        torch.set_rng_state(global_state)
        trainer(ToyTask(), tmp_path / "d").run()
        assert torch.equal(torch.get_rng_state(), drawn)

    def test_checkpoints_on_the_way(self, tmp_path):
        with pytest.raises(ZeroDivisionError):
            trainer(Failing(at=3), tmp_path, steps=6, checkpoint_every=2).run()
        assert state(tmp_path)["step"] == 2

    def test_unwritable_folder(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(OutputError, match="cannot write"):
            trainer(ToyTask(), tmp_path / "file" / "run").run()


class Failing(ToyTask):
    """Crashes at a step."""

    def __init__(self, *, at: int) -> None:
        super().__init__()
        self._at = at

    def loss(self, step: int, chance: Chance) -> tuple[torch.Tensor, dict[str, float]]:
        if step == self._at:
            raise ZeroDivisionError
        return super().loss(step, chance)


class TestNotFinite:
    @pytest.mark.parametrize("optimizer", [MUON, OptimizerSettings(warmup_steps=0)], ids=["muon", "adamw"])
    def test_a_step_is_skipped_and_changes_nothing(self, tmp_path, optimizer):
        reporter = Listener()
        before = {}

        class Watching(ToyTask):
            def loss(self, step, chance):
                before[step] = {name: weight.clone() for name, weight in self.module.state_dict().items()}
                return super().loss(step, chance)

        trainer(Watching(not_finite=(3,)), tmp_path, optimizer=optimizer, reporter=reporter, steps=6).run()
        assert_same(before[3], before[4])
        # It leaves no trace in the next one either.
        assert not torch.equal(before[4]["block.weight"], before[5]["block.weight"])
        assert all(weight.isfinite().all() for weight in before[5].values())
        assert [line["skipped"] for line in log(tmp_path)] == [0, 0, 0, 1, 0, 0]
        assert "loss" not in log(tmp_path)[3]
        assert len(reporter.warnings) == 1

    def test_five_in_a_row_end_the_run(self, tmp_path):
        task = ToyTask(not_finite=(3, 4, 5, 6, 7))
        with pytest.raises(OsoraError, match=r"not finite 5 steps in a row, up to step 8") as caught:
            trainer(task, tmp_path, steps=20, checkpoint_every=2).run()
        assert "optimizer.learning_rate" in caught.value.hint
        assert task.asked == list(range(8))
        assert all(weight.isfinite().all() for weight in state(tmp_path)["model"].values())
        assert not (tmp_path / "exported.pt").exists()

    def test_four_in_a_row_do_not(self, tmp_path):
        trainer(ToyTask(not_finite=(1, 2, 3, 4, 6, 7, 8, 9)), tmp_path, steps=12).run()
        assert log(tmp_path)[-1]["step"] == 12


class TestResume:
    @pytest.mark.parametrize("at", [1, 2, 3])
    def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(self, tmp_path, at):
        trainer(ToyTask(), tmp_path / "whole").run()
        with pytest.raises(KeyboardInterrupt) as caught:
            trainer(ToyTask(interrupt=at), tmp_path / "halves").run()
        assert caught.value.args == (f"step {at} of 4 is saved in {tmp_path / 'halves'}: go on with --resume",)
        assert not (tmp_path / "halves" / "exported.pt").exists()

        second = ToyTask()
        resumed = trainer(second, tmp_path / "halves")
        resumed.resume()
        resumed.run()
        assert second.asked == list(range(at, 4))
        assert_same(state(tmp_path / "halves"), state(tmp_path / "whole"))
        assert_same(*(dict(torch.load(tmp_path / half / "exported.pt")) for half in ("halves", "whole")))
        assert log(tmp_path / "halves") == log(tmp_path / "whole")

    def test_an_interrupt_during_an_update_finds_it_whole(self, tmp_path, monkeypatch):
        trainer(ToyTask(), tmp_path / "whole").run()
        broken = trainer(ToyTask(), tmp_path / "halves")
        muon = broken.optimizers[1]
        step = muon.step

        def interrupted_step() -> None:
            if broken.step == 2:
                signal.raise_signal(signal.SIGINT)  # the weights of adamw are updated, those of muon are not yet
            step()

        monkeypatch.setattr(muon, "step", interrupted_step)
        with pytest.raises(KeyboardInterrupt):
            broken.run()
        assert state(tmp_path / "halves")["step"] == 3
        resumed = trainer(ToyTask(), tmp_path / "halves")
        resumed.resume()
        resumed.run()
        assert_same(state(tmp_path / "halves"), state(tmp_path / "whole"))

    def test_after_a_crash_the_log_has_no_step_twice(self, tmp_path):
        with pytest.raises(ZeroDivisionError):
            trainer(Failing(at=3), tmp_path, checkpoint_every=2).run()
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write('{"step": 4, "lo')
        assert (tmp_path / "log.jsonl").read_text().count('"step": 3') == 1
        resumed = trainer(ToyTask(), tmp_path)
        resumed.resume()
        assert resumed.step == 2
        resumed.run()
        assert [line["step"] for line in log(tmp_path)] == [1, 2, 3, 4]

    def test_rates_may_be_changed(self, tmp_path):
        with pytest.raises(KeyboardInterrupt):
            trainer(ToyTask(interrupt=2), tmp_path, steps=6).run()
        resumed = trainer(
            ToyTask(), tmp_path, steps=6, optimizer=OptimizerSettings(name="muon", learning_rate=1e-4, warmup_steps=0)
        )
        resumed.resume()
        resumed.run()
        assert [line["learning_rate"] for line in log(tmp_path)] == pytest.approx([5e-4, 1e-3] + [1e-4] * 4)

    def test_a_finished_run_exports_again(self, tmp_path):
        trainer(ToyTask(), tmp_path).run()
        first = (tmp_path / "exported.pt").read_bytes()
        (tmp_path / "exported.pt").unlink()
        task = ToyTask()
        resumed = trainer(task, tmp_path)
        resumed.resume()
        resumed.run()
        assert task.asked == []
        assert (tmp_path / "exported.pt").read_bytes() == first

    def test_a_run_that_is_over(self, tmp_path):
        trainer(ToyTask(), tmp_path).run()
        with pytest.raises(RequestError, match=r"loop\.steps=3 is over already: .* is of step 4"):
            trainer(ToyTask(), tmp_path, steps=3).resume()

    @pytest.mark.parametrize("damage", ["missing", "empty", "half", "text", "other model", "other optimizer"])
    def test_broken_checkpoints(self, tmp_path, damage):
        trainer(ToyTask(), tmp_path).run()
        path = tmp_path / "checkpoint.pt"
        content = path.read_bytes()
        saved = state(tmp_path)
        match damage:
            case "missing":
                path.unlink()
            case "empty":
                path.write_bytes(b"")
            case "half":
                path.write_bytes(content[: len(content) // 2])
            case "text":
                path.write_text("not a checkpoint")
            case "other model":
                saved["model"].pop("out.bias")
                torch.save(saved, path)
            case "other optimizer":
                saved["optimizers"].pop()
                torch.save(saved, path)
        with pytest.raises(CheckpointError, match=r"checkpoint\.pt cannot be resumed from: .") as caught:
            trainer(ToyTask(), tmp_path).resume()
        assert "\n" not in caught.value.message
