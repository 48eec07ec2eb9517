"""Validation on a toy: what is measured, that training is not changed, and which clips are held out."""

import pytest
import tiny_training
import torch
from toy_training import Listener, ToyTask, draw, toy_trainer

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.batches import SampleRng, Stream
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.evaluate import HeldOutLoss, evaluating, open_validation
from opensora_cli.engine.train.run import train
from opensora_cli.settings.train_sections import ValidationSettings


def held_out(index):
    return draw(SampleRng.of(99, index, Stream.DATA), 1000 + index)


def validation(*, count=3, every=2, seed=0, last_step=100):
    settings = ValidationSettings(every=every, seed=seed)
    return HeldOutLoss(read=held_out, count=count, settings=settings, last_step=last_step)


def weights(trainer):
    return {name: value.clone() for name, value in trainer.task.module.named_parameters()}


def test_it_is_due_at_first_every_so_often_and_at_last():
    found = [step for step in range(12) if validation(every=5, last_step=11).is_due(step)]
    assert found == [0, 5, 10, 11]


def test_mean_over_clips_with_the_averaged_weights():
    trainer = toy_trainer(ToyTask())
    for _ in range(3):
        trainer.do_step()
    own = weights(trainer)
    found = validation().run(3, trainer)
    losses, scales = [], []
    with trainer.averaged(), torch.no_grad():
        averaged = weights(trainer)
        for index in range(3):
            loss, figures = trainer.task.loss(held_out(index), SampleRng.of(0, 0))
            losses.append(loss.item())
            scales.append(figures["scale"])
    assert found == pytest.approx({"loss": sum(losses) / 3, "scale": sum(scales) / 3})
    assert not torch.equal(averaged["out.weight"], own["out.weight"])
    after = weights(trainer)
    assert all(torch.equal(after[name], value) for name, value in own.items())


def test_torchs_random_state_does_not_matter():
    trainer = toy_trainer(ToyTask())
    first = validation().run(0, trainer)
    torch.manual_seed(123)
    torch.randn(7)
    assert validation().run(0, trainer) == first
    assert validation(seed=1).run(0, trainer) != first
    assert validation(count=2).run(0, trainer) != first


def test_modes_of_modules_are_restored():
    trainer = toy_trainer(ToyTask())
    with evaluating(trainer):
        assert not any(module.training for module in trainer.task.module.modules())
        assert not torch.is_grad_enabled()
    assert all(module.training for module in trainer.task.module.modules())


ON_A_TABLE = {"validation.table": tiny_training.HELD_OUT, "validation.every": 1}


class TestOpening:
    def open(self, settings):
        return open_validation(settings, distribution=Distribution(torch.device("cpu")), reporter=SilentReporter())

    def test_clips_are_those_of_the_table_and_the_same_every_time(self, tmp_path):
        settings = tiny_training.vae_settings(tmp_path).replace({**ON_A_TABLE, "validation.batches": 3})
        opened = self.open(settings)
        batches = [opened.read(index) for index in range(opened.count)]
        again = [self.open(settings).read(index) for index in range(3)]
        paths = [path for batch in batches for path in batch.paths]
        assert len(set(paths)) == len(paths) == 3
        assert all(torch.equal(one.pixels_BTHWC, other.pixels_BTHWC) for one, other in zip(batches, again, strict=True))
        assert paths == [path for batch in again for path in batch.paths]
        assert batches[0].pixels_BTHWC.shape == (1, 5, 20, 52, 3)

    def test_a_table_that_is_too_small_is_refused(self, tmp_path):
        table = tmp_path / "held_out.csv"
        table.write_text("path,text,num_frames,height,width,aspect_ratio,resolution,fps\n")
        settings = tiny_training.vae_settings(tmp_path).replace(
            {
                "validation.every": 1,
                "validation.table": str(table),
                "data.table": "clips.csv",
                "data.buckets": {"256px": {5: [1.0, 2]}},
            }
        )
        with pytest.raises(FileProblem, match="fills no micro-batch"):
            self.open(settings)


def test_a_validated_run_logs_and_learns_the_same(tmp_path):
    def run(name, **changes):
        settings = tiny_training.vae_settings(tmp_path / name).replace(changes)
        listener = Listener()
        train(settings, reporter=listener)
        events = [line for line in tiny_training.log(tmp_path / name) if "event" in line]
        return listener, events, tiny_training.losses(tmp_path / name)

    listener, events, losses = run("validated", **{**ON_A_TABLE, "validation.every": 3, "validation.batches": 2})
    assert [(line["event"], line["step"]) for line in events] == [("validation", step) for step in (0, 3, 4)]
    assert len({line["loss"] for line in events}) == 3
    assert sum(note.startswith("validation at step") for note in listener.notes) == 3
    _, none, plain = run("plain")
    assert none == []
    assert losses == plain
