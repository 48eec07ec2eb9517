"""Checkpoints are written in the background, whole or not at all, and as the weights were when they were saved."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hostile_files import little_resident_memory, state_bombs
from tiny_weights import bit_equal, read
from torch import nn

from opensora_cli.checkpoint import save
from opensora_cli.checkpoint.contents import Format
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.save import CheckpointIO
from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.core.weight_choices import Selection


class Recorder:
    """A sampler or schedule whose state is a dictionary of its own, and whose length may be 0."""

    def __init__(self, **state):
        self.state = state

    def __len__(self):
        return len(self.state)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def cloned(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


class TestSaving:
    def test_everything_comes_back(self, tmp_path):
        (model, optimizer), (ema, _) = trained(0), trained(1)
        with CheckpointIO() as io:
            folder = io.save(
                tmp_path,
                model,
                ema,
                optimizer,
                Recorder(a=3),
                Recorder(a=5),
                epoch=2,
                step=7,
                global_step=40,
                batch_size=2,
            )
        assert folder == tmp_path / "epoch2-global_step40"
        (other, its_optimizer), (its_ema, _) = trained(2), trained(3)
        schedule, sampler = Recorder(), Recorder()
        running = io.load(folder, other, its_ema, its_optimizer, schedule, sampler)
        assert running == {"epoch": 2, "step": 7, "global_step": 40, "batch_size": 2}
        assert bit_equal(other.state_dict(), model.state_dict())
        assert bit_equal(its_ema.state_dict(), ema.state_dict())
        assert (schedule.state, sampler.state) == ({"a": 3}, {"a": 5})
        moments, its_moments = optimizer.state_dict()["state"], its_optimizer.state_dict()["state"]
        assert moments.keys() == its_moments.keys()
        assert all(bit_equal(moments[key], its_moments[key]) for key in moments)
        # The optimizer goes on with the weights that it held.
        assert its_optimizer.param_groups[0]["params"][0] is other[0].weight

    def test_the_folder_is_one_that_conversion_reads(self, tmp_path):
        (model, _), (ema, _) = trained(0), trained(1)
        master = {name: tensor.double() for name, tensor in model.state_dict().items()}
        io = CheckpointIO()
        folder = io.save(tmp_path, model, ema, master=master, async_io=False)
        for select, expected in (
            (None, model.state_dict()),
            (Selection.EMA, ema.state_dict()),
            (Selection.MASTER, master),
        ):
            opened = open_checkpoint(folder, select=select)
            assert opened.format is Format.COLOSSALAI
            assert bit_equal(read(opened.entries), dict(expected))

    def test_what_is_written_is_what_was_when_it_was_saved(self, tmp_path, monkeypatch):
        (model, optimizer), goes_on, sampler = trained(0), threading.Event(), Recorder(seen=[1, 2])
        before, moments = cloned(model), optimizer.state_dict()["state"][0]["exp_avg"].clone()
        write = save._write_folder
        monkeypatch.setattr(save, "_write_folder", lambda *given: goes_on.wait(10) and write(*given))
        io = CheckpointIO()
        folder = io.save(tmp_path, model, ema=model, optimizer=optimizer, sampler=sampler)
        assert not folder.exists()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers(), optimizer.state_dict()["state"][0]["exp_avg"]):
                tensor.zero_()
        sampler.state["seen"].append(3)
        goes_on.set()
        io.wait()
        (other, its_optimizer), its_sampler = trained(1), Recorder()
        io.load(folder, other, optimizer=its_optimizer, sampler=its_sampler)
        assert its_sampler.state == {"seen": [1, 2]}
        assert bit_equal(other.state_dict(), before)
        assert torch.equal(its_optimizer.state_dict()["state"][0]["exp_avg"], moments)

    def test_a_sampler_without_samples_is_saved(self, tmp_path):
        sampler = Recorder()
        assert not sampler
        folder = CheckpointIO().save(tmp_path, sampler=sampler, async_io=False)
        CheckpointIO().load(folder, sampler=sampler)
        assert sampler.state == {}

    def test_an_interrupted_wait_keeps_the_memory_until_it_is_free(self, tmp_path, monkeypatch):
        (model, _), goes_on, write = trained(0), threading.Event(), save._write_folder
        monkeypatch.setattr(save, "_write_folder", lambda *given: goes_on.wait(10) and write(*given))
        before = cloned(model)
        io = CheckpointIO()
        folder = io.save(tmp_path, model, global_step=1)
        with torch.no_grad():
            model[0].weight.zero_()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "join", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                io.save(tmp_path, model, global_step=2)
        threading.Timer(0.2, goes_on.set).start()
        io.save(tmp_path, model, global_step=3)  # what a handler of Ctrl-C does
        io.wait()
        assert bit_equal(read(open_checkpoint(folder).entries), before)

    def test_the_next_save_waits_and_reuses_the_memory(self, tmp_path, monkeypatch):
        model, _ = trained(0)
        written, write = [], save._write_folder

        def slowly(folder, kept, running):
            threading.Event().wait(0.2)
            written.append((folder.name, kept["model"]["0.weight"].data_ptr()))
            write(folder, kept, running)

        monkeypatch.setattr(save, "_write_folder", slowly)
        with CheckpointIO() as io:
            io.save(tmp_path, model, global_step=1)
            io.save(tmp_path, model, global_step=2)
            assert [name for name, _ in written] == ["epoch0-global_step1"]
        assert [name for name, _ in written] == ["epoch0-global_step1", "epoch0-global_step2"]
        assert written[0][1] == written[1][1]

    def test_saving_again_replaces_what_is_there(self, tmp_path):
        with CheckpointIO() as io:
            io.save(tmp_path, trained(0)[0])
            folder = io.save(tmp_path, trained(1)[0])
        assert bit_equal(
            read(open_checkpoint(folder).entries),
            trained(1)[0].state_dict(),
        )


class TestErrors:
    def test_what_could_not_be_read_again_is_refused_at_once(self, tmp_path):
        with pytest.raises(OutputError, match=r"\['order'\]\['of'\] cannot be saved: ndarray"):
            CheckpointIO().save(tmp_path, sampler=Recorder(order={"of": np.arange(3)}))
        assert list(tmp_path.iterdir()) == []

    def test_other_files_are_not_lost(self, tmp_path):
        model, _ = trained(0)
        folder = CheckpointIO().save(tmp_path, model, async_io=False)
        (folder / "notes.md").write_text("mine")
        with pytest.raises(OutputError, match=r"holds more than a checkpoint, which would be lost: notes\.md"):
            CheckpointIO().save(tmp_path, model)
        assert (folder / "notes.md").read_text() == "mine"

    @pytest.fixture
    def blocked(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        return tmp_path / "file" / "run"

    def test_the_next_save_raises_the_error_once(self, tmp_path, blocked):
        model, _ = trained(0)
        io = CheckpointIO()
        io.save(blocked, model)
        with pytest.raises(OutputError, match="cannot write"):
            io.save(tmp_path, model)
        assert io.save(tmp_path, model).parent == tmp_path
        io.wait()

    def test_waiting_and_leaving_raise_the_error(self, blocked):
        io = CheckpointIO()
        io.save(blocked, trained(0)[0])
        with pytest.raises(OutputError):
            io.wait()
        with pytest.raises(OutputError), CheckpointIO() as io:
            io.save(blocked, trained(0)[0])

    def test_a_synchronous_save_raises_at_once(self, blocked):
        with pytest.raises(OutputError):
            CheckpointIO().save(blocked, trained(0)[0], async_io=False)

    def test_a_full_disk_leaves_nothing(self, tmp_path, monkeypatch):
        def full(state, file):
            file.write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(save, "save_whole", full)
        model, optimizer = trained(0)
        with pytest.raises(OutputError, match="No space left"), CheckpointIO() as io:
            io.save(tmp_path, model, optimizer=optimizer)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.slow
    def test_exit_waits_for_the_writing_and_prints_its_error(self, tmp_path, blocked):
        script = (
            "import sys, torch; from opensora_cli.checkpoint import save\n"
            "write = save._write_folder\n"
            "save._write_folder = lambda *given: (__import__('time').sleep(0.3), write(*given))\n"
            "for folder in sys.argv[1:]:\n"
            "    save.CheckpointIO().save(folder, torch.nn.Linear(2, 2), global_step=4)\n"
        )
        command = [sys.executable, "-c", script, str(tmp_path / "run"), str(blocked)]
        environment = os.environ | {"PYTHONPATH": str(Path(save.__file__).parents[2])}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert len(open_checkpoint(tmp_path / "run" / "epoch0-global_step4").entries) == 2
        assert done.stderr.startswith("error: the last checkpoint is lost: cannot write")
        assert "Traceback" not in done.stderr


class TestLoading:
    @pytest.fixture
    def folder(self, tmp_path):
        model, optimizer = trained(0)
        return CheckpointIO().save(tmp_path, model, optimizer=optimizer, async_io=False)

    def test_an_incomplete_folder_is_refused(self, folder):
        (folder / "running_states.json").unlink()
        with pytest.raises(CheckpointError, match=r"running_states\.json is missing"):
            CheckpointIO().load(folder, trained(1)[0])

    @pytest.mark.parametrize("content", ["", "[1]", "{"])
    def test_broken_running_states_are_refused(self, folder, content):
        (folder / "running_states.json").write_text(content)
        with pytest.raises(CheckpointError, match="running_states"):
            CheckpointIO().load(folder)

    def test_states_that_were_not_saved_are_refused(self, folder):
        with pytest.raises(RequestError, match="ema"):  # and nobody is asked for it over the network
            CheckpointIO().load(folder, ema=trained(1)[0])
        with pytest.raises(CheckpointError, match=r"sampler\.pt does not exist"):
            CheckpointIO().load(folder, sampler=Recorder())

    def test_states_that_would_take_all_memory_are_refused(self, folder):
        for content in state_bombs().values():
            (folder / "sampler.pt").write_bytes(content)
            with little_resident_memory(), pytest.raises(CheckpointError, match=r"sampler\.pt") as caught:
                CheckpointIO().load(folder, sampler=Recorder())
            assert "weights_only=False" not in f"{caught.value.message} {caught.value.hint}"

    def test_running_states_of_a_later_version_are_refused(self, folder):
        (folder / "running_states.json").write_text('{"schema": "osora.running-states/2"}')
        with pytest.raises(
            CheckpointError, match=r"running-states/2', and this version of osora reads 'osora\.running"
        ):
            CheckpointIO().load(folder)

    def test_a_state_of_another_optimizer_is_refused(self, folder):
        with pytest.raises(CheckpointError, match=r"optimizer\.pt is broken or of another run"):
            CheckpointIO().load(folder, optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters()))

    def test_keys_must_match_unless_strict_is_off(self, folder):
        model = nn.Sequential(nn.Linear(4, 3))
        with pytest.raises(CheckpointError, match="unexpected"):
            CheckpointIO().load(folder, model)
        with pytest.warns(UserWarning, match="unexpected"):
            CheckpointIO().load(folder, model, strict=False)
        assert torch.equal(model[0].weight, trained(0)[0][0].weight)
