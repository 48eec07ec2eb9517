"""Checkpoints are written in the background, whole or not at all, and as the weights were when they were saved."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from opensora_cli.checkpoint import save
from opensora_cli.checkpoint.contents import Format, Selection
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.save import CheckpointIO
from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError


class Counter:
    """Something with a state of its own, as samplers and schedules have."""

    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count, "seen": torch.arange(self.count)}

    def load_state_dict(self, state):
        self.count = state["count"]
        assert state["seen"].numel() == self.count


class Recorder:
    """A sampler whose state is a dictionary of its own, and whose length may be 0."""

    def __init__(self):
        self.state = {}

    def __len__(self):
        return len(self.state)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def raising(error):
    def fail(*_):
        raise error

    return fail


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def cloned(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


class TestSaving:
    def test_everything_comes_back(self, tmp_path):
        (model, optimizer), (ema, _) = trained(0), trained(1)
        with CheckpointIO() as io:
            folder = io.save(
                tmp_path, model, ema, optimizer, Counter(3), Counter(5), epoch=2, step=7, global_step=40, batch_size=2
            )
        assert folder == tmp_path / "epoch2-global_step40"
        (other, its_optimizer), (its_ema, _) = trained(2), trained(3)
        schedule, sampler = Counter(), Counter()
        running = io.load(folder, other, its_ema, its_optimizer, schedule, sampler)
        assert running == {"epoch": 2, "step": 7, "global_step": 40, "batch_size": 2}
        assert equal(other.state_dict(), model.state_dict())
        assert equal(its_ema.state_dict(), ema.state_dict())
        assert (schedule.count, sampler.count) == (3, 5)
        moments, its_moments = optimizer.state_dict()["state"], its_optimizer.state_dict()["state"]
        assert moments.keys() == its_moments.keys()
        assert all(equal(moments[key], its_moments[key]) for key in moments)
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
            assert equal({name: entry.read() for name, entry in opened.entries.items()}, dict(expected))

    def test_what_is_written_is_what_was_when_it_was_saved(self, tmp_path, monkeypatch):
        (model, optimizer), goes_on = trained(0), threading.Event()
        before, moments = cloned(model), optimizer.state_dict()["state"][0]["exp_avg"].clone()
        write = save._write_folder
        monkeypatch.setattr(save, "_write_folder", lambda *given: goes_on.wait(10) and write(*given))
        io = CheckpointIO()
        folder = io.save(tmp_path, model, ema=model, optimizer=optimizer)
        assert not folder.exists()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers(), optimizer.state_dict()["state"][0]["exp_avg"]):
                tensor.zero_()
        goes_on.set()
        io.wait()
        other, its_optimizer = trained(1)
        io.load(folder, other, optimizer=its_optimizer)
        assert equal(other.state_dict(), before)
        assert torch.equal(its_optimizer.state_dict()["state"][0]["exp_avg"], moments)

    def test_plain_values_are_copied_too(self, tmp_path, monkeypatch):
        goes_on, write = threading.Event(), save._write_folder
        monkeypatch.setattr(save, "_write_folder", lambda *given: goes_on.wait(10) and write(*given))
        sampler = Recorder()
        sampler.state["seen"] = [1, 2]
        io = CheckpointIO()
        folder = io.save(tmp_path, sampler=sampler)
        sampler.state["seen"].append(3)
        goes_on.set()
        io.wait()
        other = Recorder()
        io.load(folder, sampler=other)
        assert other.state == {"seen": [1, 2]}

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
            patched.setattr(threading.Thread, "join", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                io.save(tmp_path, model, global_step=2)
        threading.Timer(0.2, goes_on.set).start()
        io.save(tmp_path, model, global_step=3)  # what a handler of Ctrl-C does
        io.wait()
        assert equal({name: entry.read() for name, entry in open_checkpoint(folder).entries.items()}, before)

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
        assert equal(
            {name: entry.read() for name, entry in open_checkpoint(folder).entries.items()},
            trained(1)[0].state_dict(),
        )


class TestErrors:
    def test_what_could_not_be_read_again_is_refused_at_once(self, tmp_path):
        sampler = Recorder()
        sampler.state["order"] = {"of": np.arange(3)}
        with pytest.raises(OutputError, match=r"\['order'\]\['of'\] cannot be saved: ndarray"):
            CheckpointIO().save(tmp_path, sampler=sampler)
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

    def test_exit_waits_for_the_writing_and_prints_its_error(self, tmp_path, blocked):
        script = (
            "import sys, torch; from opensora_cli.checkpoint import save\n"
            "write = save._write_folder\n"
            "save._write_folder = lambda *given: (__import__('time').sleep(0.3), write(*given))\n"
            "save.CheckpointIO().save(sys.argv[1], torch.nn.Linear(2, 2), global_step=4)\n"
        )

        def run(where):
            environment = os.environ | {"PYTHONPATH": str(Path(save.__file__).parents[2])}
            command = [sys.executable, "-c", script, str(where)]
            return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

        done = run(tmp_path / "run")
        assert done.returncode == 0, done.stderr
        assert len(open_checkpoint(tmp_path / "run" / "epoch0-global_step4").entries) == 2
        done = run(blocked)
        assert "error: the last checkpoint is lost: cannot write" in done.stderr
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
            CheckpointIO().load(folder, sampler=Counter())

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


KILLED = """
import json, sys
from pathlib import Path
import torch
import killing
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.save import CheckpointIO

torch.set_num_threads(1)
work, stride = Path(sys.argv[1]), int(sys.argv[2])
folder = work / "epoch0-global_step0"

def save(value):
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=value)
    with CheckpointIO() as io:
        io.save(work, model, ema=model, optimizer=optimizer)
        torch.nn.init.zeros_(model.weight)

def prepare():
    __import__("shutil").rmtree(work, ignore_errors=True)
    save(1.0)

found = []

def check():
    model, optimizer = torch.nn.Linear(3, 2), torch.optim.SGD([torch.zeros(1), torch.zeros(1)], lr=9.0)
    CheckpointIO().load(folder, model, optimizer=optimizer)
    value = float(model.weight[0, 0])
    assert (model.weight == value).all()
    assert optimizer.param_groups[0]["lr"] == value
    assert float(open_checkpoint(folder / "ema.safetensors").entries["weight"].read()[0, 0]) == value
    found.append(value)

killing.kill_at_every_step(prepare, lambda: save(2.0), check, stride=stride)
print(json.dumps(found))
"""


def check_kills(folder, stride):
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    command = [sys.executable, "-c", KILLED, str(folder / "work"), str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == [1.0] * found.count(1.0) + [2.0] * found.count(2.0)
    assert found.count(1.0) > 10 / stride
    assert found.count(2.0) >= 1


def test_a_killed_save_leaves_the_old_checkpoint_or_the_new(tmp_path):
    check_kills(tmp_path, 7)


@pytest.mark.slow
def test_a_save_killed_at_every_step(tmp_path):
    check_kills(tmp_path, 1)
