"""`train`: both targets in small, one after the other, and the files between them."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import tiny_training
import tiny_world
import torch
from safetensors.torch import load_file, save_file
from toy_training import Listener

from opensora_cli.checkpoint.load import load_into_module
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.choices import Selection
from opensora_cli.core.exceptions import (
    CheckpointError,
    FileProblem,
    HardwareError,
    OutputError,
    RequestError,
    TrainingError,
)
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.components.architectures import autoencoder_on_meta, transformer_on_meta
from opensora_cli.engine.encode.clip_cache import write_header
from opensora_cli.engine.encode.clips import EmptyPrompt
from opensora_cli.engine.train import checkpoints, run
from opensora_cli.engine.train.build import build_task, count_parameters
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.plan import plan_training, with_memory
from opensora_cli.engine.train.run import train
from opensora_cli.engine.train.trainer import Trainer

FLOAT32 = {"device": "cpu", "dtype": torch.float32}


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    train(tiny_training.vae_settings(folder / "run"))
    return folder / "run"


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    tiny_world.save_t5(folder / "t5")
    tiny_world.save_clip(folder / "clip")
    return folder


def exported(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name not in ("log.jsonl", "settings.json")
        and not path.relative_to(folder).parts[0].startswith("epoch")
    }


class TestBeforeRanks:
    """Refusals that every rank would repeat come before one is started."""

    @pytest.fixture(autouse=True)
    def _no_ranks(self, monkeypatch):
        monkeypatch.setattr(run, "launch", lambda *_, **__: pytest.fail("ranks are started"))

    def test_a_table_that_cannot_be_read(self, tmp_path, vae_folder, text_folder):
        (tmp_path / "clips.csv").write_text("path,text\na.mp4,a boat\n")
        changes = {"parallel.gpus": 2, "device": "cpu", "data.table": str(tmp_path / "clips.csv")}
        with pytest.raises(FileProblem, match="num_frames"):
            train(tiny_training.mmdit_settings(tmp_path / "run", vae_folder, text_folder).replace(changes))

    def test_a_cache_of_other_settings(self, tmp_path, vae_folder, text_folder):
        folder = tmp_path / "cache"
        write_header(folder, {"fit": "other"}, EmptyPrompt(torch.zeros(2, 4), torch.zeros(3)))
        (folder / "clips-0.safetensors").touch()
        changes = {"parallel.gpus": 2, "device": "cpu", "train_mmdit.cache": str(folder)}
        with pytest.raises(FileProblem, match=r"was made for another run, which differs in: .*fit"):
            train(tiny_training.mmdit_settings(tmp_path / "run", vae_folder, text_folder).replace(changes))


class TestVae:
    def test_the_export_is_read_back(self, vae_folder):
        vae = autoencoder_on_meta(tiny_training.vae_settings(vae_folder).vae)
        load_into_module(vae, vae_folder / "vae.safetensors", **FLOAT32)
        assert vae.decode(torch.zeros(1, 4, 2, 8, 8)).shape == (1, 3, 5, 32, 32)
        assert len(tiny_training.log(vae_folder)) == 4

    def test_torchs_random_state_is_kept_and_nothing_is_printed(self, tmp_path, capfd):
        before = torch.get_rng_state()
        train(tiny_training.vae_settings(tmp_path))
        assert torch.equal(torch.get_rng_state(), before)
        assert capfd.readouterr() == ("", "")


class TestMMDiT:
    def test_all_modes_train_and_the_export_is_read_back(self, tmp_path, vae_folder, text_folder):
        settings = tiny_training.mmdit_settings(tmp_path / "run", vae_folder, text_folder)
        result = train(settings)
        assert result.exports == (tmp_path / "run" / "transformer.safetensors",)
        transformer = transformer_on_meta(settings.model)
        load_into_module(transformer, result.exports[0], **FLOAT32)
        assert any(weight.abs().sum() > 0 for weight in transformer.final_layer.linear.parameters())

    def test_checkpointing_and_offload_change_no_bit(self, tmp_path, vae_folder, text_folder):
        def trained(name, **memory):
            settings = tiny_training.mmdit_settings(tmp_path / name, vae_folder, text_folder)
            changes = {f"memory.{key}": value for key, value in memory.items()}
            settings = settings.replace({"loop.steps": 2, **changes})
            train(settings)
            return tiny_training.losses(tmp_path / name), exported(tmp_path / name)

        losses, weights = trained("plain")
        assert len(set(losses)) == 2
        for how in ("selective", "offload"):
            assert trained(how, checkpointing=how) == (losses, weights)

    def test_a_transformers_run_is_resumed(self, tmp_path, vae_folder, text_folder):
        settings = tiny_training.mmdit_settings(tmp_path, vae_folder, text_folder)
        with pytest.raises(KeyboardInterrupt, match="step 2 of 4 is saved"):
            train(settings, reporter=tiny_training.StopAfter(2))
        assert running_states(tmp_path, 2)["attention"]["backend"] == "sdpa"
        warned = []
        reporter = SilentReporter()
        reporter.warn = warned.append
        result = train(settings.replace({"train_mmdit.attention": "math"}), resume=True, reporter=reporter)
        assert (result.resumed_from, result.attention.line()) == (2, "math (as set)")
        assert running_states(tmp_path, 4)["attention"]["backend"] == "math"
        [line] = warned
        assert line.startswith("attention: math (as set), and up to this checkpoint it was sdpa: ")

    def test_widths_that_contradict_the_encoders_are_refused(self, tmp_path, vae_folder, text_folder):
        settings = tiny_training.mmdit_settings(tmp_path, vae_folder, text_folder)
        for key in ("context_in_dim", "vec_in_dim"):
            with pytest.raises(RequestError, match=rf"model\.{key}=24 must be the width of .*: use 16"):
                train(settings.replace({f"model.{key}": 24}))


class TestOutput:
    def test_an_earlier_run_is_not_overwritten(self, tmp_path, vae_folder):
        settings = tiny_training.vae_settings(vae_folder)
        before = exported(vae_folder)
        with pytest.raises(
            OutputError, match=r"holds an earlier run: epoch0-global_step4, log\.jsonl, vae\.safetensors"
        ) as e:
            train(settings)
        assert "--resume" in e.value.hint
        assert "--overwrite" in e.value.hint
        assert exported(vae_folder) == before
        tmp_path.joinpath("vae.safetensors").touch()
        with pytest.raises(OutputError, match=r"holds an earlier run: vae\.safetensors") as caught:
            train(tiny_training.vae_settings(tmp_path))
        assert "--resume" not in caught.value.hint


class TestEnd:
    """Runs that fail, are interrupted, or warn."""

    def settings(self, folder, **changes):
        return tiny_training.vae_settings(folder).replace({"checkpoints.every": 2, **changes})

    def test_weights_are_exported_although_no_save_succeeds(self, tmp_path, vae_folder, monkeypatch):
        def full(*args):
            raise OutputError("the disk is full")

        monkeypatch.setattr(checkpoints, "write_share", full)
        listener = Listener()
        with pytest.raises(OutputError, match="the disk is full"):
            train(self.settings(tmp_path), reporter=listener)
        assert listener.warnings == [f"step {step} is not saved: the disk is full" for step in (2, 4)]
        assert listener.notes[-1] == f"the weights of step 4 are exported to {tmp_path}"
        assert exported(tmp_path) == exported(vae_folder)
        # Nor is an interrupted run reported as saved.
        with pytest.raises(OutputError, match="the disk is full"):
            train(self.settings(tmp_path / "interrupted"), reporter=tiny_training.StopAfter(2))

    @pytest.mark.parametrize(
        ("finite", "way"),
        [([False], "start again with --overwrite"), ([True, False], "--resume from the last checkpoint")],
    )
    def test_weights_that_are_not_finite_end_the_run_with_a_hint(self, tmp_path, monkeypatch, finite, way):
        answers = iter(finite)
        monkeypatch.setattr(Trainer, "are_weights_finite", lambda self: next(answers))
        with pytest.raises(TrainingError, match=f"not finite after step {2 * len(finite)}") as caught:
            train(self.settings(tmp_path))
        assert caught.value.hint == f"{way}, and use a lower rate: --set optimizer.learning_rate=X"
        assert len(list(tmp_path.glob("epoch*"))) == len(finite) - 1

    def test_a_device_without_memory_ends_the_run_with_a_hint(self, tmp_path, monkeypatch):
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        monkeypatch.setattr(Trainer, "do_step", lambda self: (_ for _ in ()).throw(error))
        with pytest.raises(HardwareError, match="CUDA out of memory") as caught:
            train(self.settings(tmp_path))
        assert caught.value.hint.startswith("start again with --overwrite, and use smaller batches")

    @pytest.mark.parametrize(("compute", "multiplies"), [("bf16", False), ("bf16", True), ("fp32", False)])
    def test_a_cpu_that_is_slow_at_what_was_chosen_is_named(self, tmp_path, monkeypatch, compute, multiplies):
        monkeypatch.setattr(run, "multiplies_bf16", lambda device: multiplies)
        listener = Listener()
        train(self.settings(tmp_path, **{"loop.steps": 1, "precision.compute": compute}), reporter=listener)
        told = ["use --set precision.compute=fp32" in line for line in listener.warnings]
        assert told == ([True] if compute == "bf16" and not multiplies else [])

    @pytest.mark.parametrize(
        ("due", "during_validation"), [(2, True), (2, False), pytest.param(4, False, marks=pytest.mark.slow)]
    )
    def test_a_resumed_run_does_what_ctrl_c_skipped(self, tmp_path, monkeypatch, due, during_validation):
        validation, samples = with_events(monkeypatch, due=due, validation_interrupts=during_validation)
        reporter = SilentReporter() if during_validation else tiny_training.StopAfter(due)
        with pytest.raises(KeyboardInterrupt, match=f"step {due} of 4 is saved"):
            train(self.settings(tmp_path), reporter=reporter)
        assert (validation.started, samples.started) == ([due] if during_validation else [], [])
        assert [path.name for path in sorted(tmp_path.glob("epoch*"))][-1] == f"epoch0-global_step{due}"
        validation.interrupts = False
        train(self.settings(tmp_path), resume=True)
        assert (validation.started, samples.started) == ([due], [due])
        # The second time nothing is left.
        train(self.settings(tmp_path), resume=True)
        assert validation.started == [due]

    def test_a_checkpoint_stays_when_it_is_resumed_from(self, tmp_path, vae_folder):
        folder = Path(shutil.copytree(vae_folder, tmp_path / "run"))
        before = running_states(folder, 4)
        assert train(self.settings(folder), resume=True).checkpoint == folder / "epoch0-global_step4"
        assert running_states(folder, 4) == before


class Event:
    """Validation or sample videos, due at one step."""

    def __init__(self, due, *, interrupts=False):
        self.started = []
        self.interrupts = interrupts
        self._due = due

    def is_due(self, step):
        return step == self._due

    def run(self, step, trainer):
        self.started.append(step)
        if self.interrupts:
            signal.raise_signal(signal.SIGINT)
        return {"loss": 1.0}


def with_events(monkeypatch, *, due, validation_interrupts=False):
    validation, samples = Event(due, interrupts=validation_interrupts), Event(due)
    monkeypatch.setattr(run, "open_validation", lambda *args, **kwargs: validation)
    monkeypatch.setattr(run, "open_samples", lambda *args, **kwargs: samples)
    return validation, samples


def running_states(folder, step):
    return json.loads((folder / f"epoch0-global_step{step}" / "running_states.json").read_text())


class TestPlan:
    def test_parameters_are_those_that_are_trained(self, tmp_path, vae_folder, text_folder):
        for settings, counted in (
            (tiny_training.vae_settings(vae_folder), True),
            (tiny_training.mmdit_settings(tmp_path, vae_folder, text_folder), False),
        ):
            plan = plan_training(settings, resume=counted)
            if counted:
                saved = open_checkpoint(vae_folder, select=Selection.EMA).entries
                assert plan.parameters == sum(entry.numel for entry in saved.values())
            assert plan.parameters > 1000
            assert plan.missing_weights == ()

    def test_a_plan_lacks_what_this_torch_cannot_estimate(self, tmp_path, monkeypatch):
        settings = tiny_training.mmdit_settings(tmp_path)
        settings = settings.replace({"parallel.gpus": 2, "strategy": "zero2", "optimizer.name": "adamw"})
        plan, reporter, warned = plan_training(settings), SilentReporter(), []
        reporter.warn = warned.append
        monkeypatch.setattr(torch, "__version__", "2.10.0")
        assert with_memory(plan, reporter=reporter) == plan
        [line] = warned
        assert "is not estimated with torch 2.10.0" in line

    def test_missing_parts_are_listed(self, tmp_path, vae_folder):
        plan = plan_training(tiny_training.mmdit_settings(tmp_path / "run", vae_folder))
        assert plan.missing_weights == ("t5", "clip")
        assert plan.weights["vae.safetensors"] == vae_folder / "vae.safetensors"
        assert any("missing" in line and "clip" in line for line in plan.lines())
        assert plan.to_json()["missing_weights"] == ["t5", "clip"]
        assert not (tmp_path / "run").exists()


class TestInit:
    """The first weights of a run."""

    def built(self, settings):
        return build_task(settings, distribution=Distribution(torch.device("cpu")), reporter=SilentReporter()).module

    def test_weights_of_an_autoencoder(self, tmp_path, vae_folder):
        settings = tiny_training.vae_settings(tmp_path).replace({"init": str(vae_folder / "vae.safetensors")})
        found, stored = self.built(settings).state_dict(), load_file(vae_folder / "vae.safetensors")
        assert found.keys() == stored.keys()
        for name, value in found.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, stored[name].float())

    def test_of_a_decoder_that_is_trained_alone_all_that_makes_latents_stays(self, tmp_path, vae_folder):
        first = vae_folder / "vae.safetensors"
        settings = tiny_training.vae_settings(tmp_path / "run").replace(
            {
                "init": str(first),
                "train_vae": {"decoder_only": True, "export_half": True},
                "optimizer.weight_decay": 0.1,
            }
        )
        assert count_parameters(settings) == sum(
            weight.numel() for weight in self.built(settings).parameters() if weight.requires_grad
        )
        train(settings)
        made, given = load_file(tmp_path / "run" / "vae.safetensors"), load_file(first)
        assert made.keys() == given.keys()
        changed = {name.partition(".")[0] for name, value in made.items() if not torch.equal(value, given[name])}
        assert changed == {"decoder", "post_quant_conv"}

    def test_a_frozen_encoder_is_on_the_device(self, tmp_path, vae_folder):
        settings = tiny_training.vae_settings(tmp_path).replace(
            {"init": str(vae_folder / "vae.safetensors"), "train_vae": {"decoder_only": True}}
        )
        distribution = Distribution(torch.device("meta"))
        module = build_task(settings, distribution=distribution, reporter=SilentReporter()).module
        assert {weight.device.type for weight in module.encoder.parameters()} == {"meta"}

    def test_weights_of_a_transformer_without_references(self, tmp_path, vae_folder, text_folder):
        settings = tiny_training.mmdit_settings(tmp_path, vae_folder, text_folder)
        weights = {name: value.half() for name, value in self.built(settings).state_dict().items()}
        path = tmp_path / "pictures.safetensors"
        save_file({name: value for name, value in weights.items() if not name.startswith("cond_in.")}, path)
        found = self.built(settings.replace({"init": str(path), "loop.seed": 1})).state_dict()
        for name, value in found.items():
            expected = torch.zeros_like(value) if name.startswith("cond_in.") else weights[name].float()
            assert torch.equal(value, expected)

    def test_the_file_may_change_after_it_was_read(self, tmp_path, vae_folder, text_folder):
        settings = tiny_training.mmdit_settings(tmp_path, vae_folder, text_folder)
        path = tmp_path / "first.safetensors"
        save_file(self.built(settings).state_dict(), path)
        module = self.built(settings.replace({"init": str(path)}))
        before = {name: value.clone() for name, value in module.state_dict().items()}
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.write(bytes(len(content)))
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())

    def test_other_models_are_refused(self, tmp_path, text_folder):
        settings = tiny_training.vae_settings(tmp_path / "run")
        with pytest.raises(CheckpointError, match="does not fit the model"):
            train(settings.replace({"init": str(text_folder / "t5" / "model.safetensors")}))
        assert not (tmp_path / "run").exists()
