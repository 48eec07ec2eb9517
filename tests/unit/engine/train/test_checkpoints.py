"""Checkpoints of a run, on a toy: what is in them, which are kept, and which one is resumed from."""

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_training import MUON, Listener, ToyTask, toy_trainer

from opensora_cli.checkpoint import shared_folder
from opensora_cli.checkpoint.shared_folder import remove_checkpoint, wrong_files
from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.engine.train import checkpoints as checkpoints_module
from opensora_cli.engine.train.checkpoints import (
    CheckpointWriter,
    choose_checkpoint,
    restore,
    set_aside_newer,
    tensors_of,
)
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.trainer import Trainer

ALONE = Distribution(torch.device("cpu"))


def state(trainer: Trainer) -> dict[tuple[str, str], torch.Tensor]:
    return {(part.file, part.key): part.tensor.clone() for part in tensors_of(trainer)}


def assert_same(one: dict[tuple[str, str], torch.Tensor], other: dict[tuple[str, str], torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def trained(*, steps: int = 1, adversary: bool = False, **loop: object) -> Trainer:
    trainer = toy_trainer(ToyTask(opposed_from=0 if adversary else None), optimizer=MUON, **loop)
    for _ in range(steps):
        trainer.do_step()
    return trainer


def saved(trainer: Trainer, folder: Path) -> Path:
    with CheckpointWriter(folder) as writer:
        return writer.save(trainer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestSave:
    def test_files_of_a_checkpoint(self, tmp_path):
        folder = saved(trained(steps=3, adversary=True, micro_batches=2), tmp_path)
        assert folder == tmp_path / "epoch0-global_step3"
        assert names(tmp_path) == [folder.name]
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        assert files == [
            "adversary.safetensors",
            "ema.safetensors",
            "model/model-00001-of-00001.safetensors",
            "model/model.safetensors.index.json",
            "optimizer/adversary_moments.safetensors",
            "optimizer/moments.safetensors",
            "running_states.json",
        ]
        running = json.loads((folder / "running_states.json").read_text())
        assert (running["epoch"], running["global_step"], running["micro_batches"]) == (0, 3, 2)
        assert sorted(running["sha256"]) == [name for name in files if name != "running_states.json"]

    def test_weights_may_change_right_after_it(self, tmp_path, monkeypatch):
        trainer = trained(steps=2, adversary=True)
        may_write = threading.Event()
        write = shared_folder.write_share

        def waiting(*args: object) -> None:
            assert may_write.wait(30)
            write(*args)

        monkeypatch.setattr(checkpoints_module, "write_share", waiting)
        expected = state(trainer)
        with CheckpointWriter(tmp_path) as writer:
            folder = writer.save(trainer)
            assert not folder.exists()
            trainer.do_step()
            may_write.set()
        fresh = trained(steps=0, adversary=True)
        restore(fresh, folder)
        assert_same(state(fresh), expected)
        assert fresh.step == 2

    def test_a_failed_save_is_a_warning_and_the_last_one_an_error(self, tmp_path):
        trainer, listener = trained(), Listener()
        run = tmp_path / "run"
        run.touch()
        writer = CheckpointWriter(run, reporter=listener)
        for step in (1, 2, 3, 4):
            trainer.step = step
            writer.save(trainer)
            writer._job.wait()
            assert len(listener.warnings) == min(step, 2)
            if step == 2:
                run.unlink()
        writer.wait()
        assert names(run) == ["epoch0-global_step3", "epoch0-global_step4"]
        assert listener.warnings[0].startswith(f"step 1 is not saved: cannot write {run / 'epoch0-global_step1'}: ")
        with (
            pytest.raises(OutputError, match="cannot write"),
            CheckpointWriter(run / names(run)[0] / "ema.safetensors") as writer,
        ):
            writer.save(trainer)

    def test_a_bug_in_the_background_is_raised_at_once(self, tmp_path, monkeypatch):
        def broken(*args: object) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr(checkpoints_module, "write_share", broken)
        writer = CheckpointWriter(tmp_path)
        writer.save(trained())
        with pytest.raises(ValueError, match="a bug"):
            writer.save(trained())


class TestKept:
    def run(self, folder: Path) -> None:
        trainer = trained(steps=0)
        with CheckpointWriter(folder, keep=1) as writer:
            for trainer.step in (1, 2):
                writer.save(trainer)

    def test_a_removed_checkpoint_is_renamed_before_its_first_file_goes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(shared_folder.shutil, "rmtree", lambda path, ignore_errors: None)
        self.run(tmp_path)
        assert (tmp_path / "epoch0-global_step2").is_dir()
        assert not (tmp_path / "epoch0-global_step1").exists()
        (going,) = tmp_path.glob(".saving-*")
        assert wrong_files(going) == []
        monkeypatch.undo()
        shared_folder.remove_unfinished(tmp_path)
        assert names(tmp_path) == ["epoch0-global_step2"]

    def test_the_newest_and_what_is_no_checkpoint_are_kept(self, tmp_path):
        (tmp_path / "notes").mkdir()
        (tmp_path / "epoch0-global_step0").mkdir()
        self.run(tmp_path)
        # What was never finished is no checkpoint of a run.
        assert names(tmp_path) == ["epoch0-global_step0", "epoch0-global_step2", "notes"]


class TestRestore:
    @pytest.mark.parametrize("adversary", [False, True])
    def test_a_restored_run_repeats_every_figure_and_bit(self, tmp_path, adversary):
        whole = trained(steps=2, adversary=adversary, micro_batches=2)
        folder = saved(whole, tmp_path)
        expected = [whole.do_step() for _ in range(4)]
        fresh = trained(steps=0, adversary=adversary, micro_batches=2)
        running = restore(fresh, folder)
        assert running.global_step == fresh.step == 2
        found = [fresh.do_step() for _ in range(4)]
        for one, other in zip(expected, found, strict=True):
            assert one.figures == other.figures
            assert one.learning_rate == other.learning_rate
            assert one.paths == other.paths
        assert_same(state(whole), state(fresh))

    def test_a_new_average_starts_as_a_copy_of_the_weights(self, tmp_path):
        trainer = trained(steps=2, ema_decay=None)
        fresh = trained(steps=0)
        restore(fresh, saved(trainer, tmp_path))
        assert torch.equal(fresh.ema["out.weight"], trainer.task.module.out.weight)

    def test_a_checkpoint_of_another_model_is_refused(self, tmp_path):
        folder = saved(trained(), tmp_path)
        other = ToyTask()
        other.module.out = torch.nn.Linear(3, 2)
        with pytest.raises(CheckpointError, match=r"of another model: out\.weight is \[1, 3\], and must be \[2, 3\]"):
            restore(toy_trainer(other, optimizer=MUON), folder)
        other.module.extra = torch.nn.Linear(1, 1)
        with pytest.raises(CheckpointError, match=r"extra\.bias, extra\.weight are not in both"):
            restore(toy_trainer(other, optimizer=MUON), folder)

    def test_moments_of_other_weights_or_of_another_optimizer_are_refused(self, tmp_path):
        folder = saved(trained(), tmp_path)
        path = folder / "optimizer" / "moments.safetensors"
        moments = load_file(path)
        for changes, problem in (
            ({"exp_avg.head.weight": torch.zeros(1)}, r"exp_avg\.head\.weight are not in both"),
            ({"exp_avg.out.weight": torch.zeros(2)}, r"exp_avg\.out\.weight is \[2\], and must be \[1, 3\]"),
        ):
            save_file({**moments, **changes}, path)
            with pytest.raises(CheckpointError, match=problem):
                restore(trained(steps=0), folder)
        save_file({name: tensor for name, tensor in moments.items() if name != "exp_avg.out.weight"}, path)
        with pytest.raises(CheckpointError, match=r"exp_avg\.out\.weight are not in both"):
            restore(trained(steps=0), folder)


class TestChoose:
    def run_folder(self, tmp_path: Path) -> Path:
        trainer = trained(steps=0)
        with CheckpointWriter(tmp_path) as writer:
            for _ in range(3):
                trainer.do_step()
                writer.save(trainer)
        return tmp_path

    def spoil(self, folder: Path, name: str = "ema.safetensors") -> None:
        path = folder / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    def choose(self, run: Path, resume: Path | bool = True) -> Path:
        return choose_checkpoint(run, resume, distribution=ALONE)

    @pytest.mark.parametrize(
        ("output", "spelled"), [("run", "/run"), ("/run", "run"), ("run", "link"), ("link", "x/../run")]
    )
    def test_one_is_chosen_by_any_spelling_of_its_path(self, tmp_path, monkeypatch, output, spelled):
        def path(spelling: str) -> Path:
            return tmp_path / spelling[1:] if spelling.startswith("/") else Path(spelling)

        monkeypatch.chdir(tmp_path)
        (tmp_path / "x").mkdir()
        (tmp_path / "link").symlink_to("run")
        run, folder = self.run_folder(tmp_path / "run"), path(spelled) / "epoch0-global_step2"
        chosen = self.choose(path(output), folder)
        assert chosen == path(output) / folder.name
        set_aside_newer(path(output), chosen, reporter=Listener())
        assert names(run) == ["aside-1-epoch0-global_step3", "epoch0-global_step1", "epoch0-global_step2"]
        self.spoil(folder)
        with pytest.raises(CheckpointError) as caught:
            self.choose(path(output), folder)
        assert caught.value.hint == (f"use the one before: --resume-from {path(output) / 'epoch0-global_step1'}")

    def test_a_broken_one_is_reported(self, tmp_path):
        run, name = self.run_folder(tmp_path), "optimizer/moments.safetensors"
        self.spoil(run / "epoch0-global_step3", name)
        with pytest.raises(CheckpointError, match=f"is broken:\n.*{name} is not what was written") as caught:
            self.choose(run)
        assert caught.value.hint == f"use the one before: --resume-from {run / 'epoch0-global_step2'}"
        for step in (1, 2):
            remove_checkpoint(run / f"epoch0-global_step{step}")
        with pytest.raises(CheckpointError, match="epoch0-global_step3 is broken") as caught:
            self.choose(run)
        assert caught.value.hint == "start again with --overwrite"
