"""Names of checkpoints, called as the community calls them."""

import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_hub import FakeHub, connect
from safetensors.torch import save_file
from torch import nn

from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.community import checkpoint
from opensora_cli.community.checkpoint import (
    CheckpointIO,
    load_from_hf_hub,
    model_sharding,
    record_model_param_shape,
    rm_checkpoints,
)
from opensora_cli.community.training import create_lr_scheduler
from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError


class Sampler:
    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def equal(first: nn.Module, second: nn.Module) -> bool:
    others = second.state_dict()
    return all(torch.equal(tensor, others[name]) for name, tensor in first.state_dict().items())


def run(seed: int) -> dict[str, object]:
    made = model(seed)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    made(torch.ones(5, 4)).square().sum().backward()
    optimizer.step()
    scheduler = create_lr_scheduler(optimizer, 10, 2, warmup_steps=2, use_cosine_scheduler=True)
    for _ in range(seed):
        optimizer.step()
        scheduler.step()
    return {
        "model": made,
        "ema": copy.deepcopy(made),
        "optimizer": optimizer,
        "lr_scheduler": scheduler,
        "sampler": Sampler(seed),
    }


class TestCheckpointIO:
    @pytest.mark.parametrize("by_position", [True, False])
    def test_a_run_comes_back(self, tmp_path, by_position):
        io, saved, other = CheckpointIO(n_write_entries=32), run(3), run(1)
        shapes = record_model_param_shape(saved["ema"])
        expected = copy.deepcopy(saved["ema"])
        model_sharding(saved["ema"])
        counts = {"epoch": 2, "step": 7, "global_step": 80, "batch_size": 2, "lora": False, "actual_update_step": 40}
        options = {"ema_shape_dict": shapes, "async_io": True, "include_master_weights": False}
        if by_position:
            folder = io.save(None, str(tmp_path), **saved, **counts, **options)
        else:
            folder = io.save(booster=None, save_dir=str(tmp_path), **saved, **counts, **options)
        assert folder == str(tmp_path / "epoch2-global_step40")
        start = io.load(None, folder, **other, strict=True, include_master_weights=False)
        assert start == (2, 7)
        assert equal(other["model"], saved["model"])
        assert equal(other["ema"], expected)
        assert other["sampler"].position == 3
        assert other["lr_scheduler"].get_last_lr() == saved["lr_scheduler"].get_last_lr()
        for each in (saved, other):
            each["lr_scheduler"].step()
        assert other["optimizer"].param_groups[0]["lr"] == saved["optimizer"].param_groups[0]["lr"]

    def test_with_lora_the_adapter_is_saved_as_peft_reads_it(self, tmp_path):
        peft = pytest.importorskip("peft")

        def adapted(seed: int) -> nn.Module:
            torch.manual_seed(seed)
            made = peft.get_peft_model(model(0), peft.LoraConfig(r=2, target_modules=["0"]))
            nn.init.normal_(made.base_model.model[0].lora_B.default.weight)
            return made

        first, second = adapted(1), adapted(2)
        folder = CheckpointIO().save(None, tmp_path, first, lora=True, epoch=1, step=3, async_io=False)
        assert not Path(folder, "model").exists()
        assert json.loads(Path(folder, "lora", "adapter_config.json").read_text())["r"] == 2
        assert CheckpointIO().load(None, folder, second) == (1, 3)
        assert equal(first, second)
        assert equal(peft.PeftModel.from_pretrained(model(0), f"{folder}/lora"), first)

    def test_files_of_the_reference_are_read(self, tmp_path):
        folder, saved, other = tmp_path / "epoch0-global_step5", run(3), run(1)
        (folder / "model").mkdir(parents=True)
        save_file(saved["model"].state_dict(), folder / "model" / "model.safetensors")
        for name in ("lr_scheduler", "sampler"):
            torch.save(saved[name].state_dict(), folder / name)
        (folder / "running_states.json").write_text('{"epoch": 0, "step": 5, "global_step": 5}')
        wanted = {name: other[name] for name in ("model", "lr_scheduler", "sampler")}
        assert CheckpointIO().load(None, folder, **wanted, ema=None, optimizer=None) == (0, 5)
        assert equal(other["model"], saved["model"])
        assert other["sampler"].position == 3

    def test_what_makes_no_sense_here_is_refused(self, tmp_path):
        with pytest.raises(RequestError, match="booster must be None"):
            CheckpointIO().save(tmp_path, model(0))
        with pytest.raises(RequestError, match="booster must be None"):
            CheckpointIO().load(object(), tmp_path)
        with pytest.raises(RequestError, match="include_master_weights") as caught:
            CheckpointIO().save(None, tmp_path, model(0), include_master_weights=True)
        assert "master=" in caught.value.hint
        assert list(tmp_path.iterdir()) == []

    def test_states_may_change_while_they_are_written(self, tmp_path, monkeypatch):
        saved, may_write, write = run(3), threading.Event(), checkpoint.write_share
        expected = copy.deepcopy(saved)
        monkeypatch.setattr(checkpoint, "write_share", lambda *given: may_write.wait(10) and write(*given))
        io, other = CheckpointIO(), run(1)
        folder = Path(io.save(None, tmp_path, **saved))
        assert not folder.exists()
        with torch.no_grad():
            for tensor in (*saved["model"].parameters(), saved["optimizer"].state_dict()["state"][0]["exp_avg"]):
                tensor.zero_()
        saved["sampler"].position = 9
        may_write.set()
        io.load(None, folder, **other)
        assert equal(other["model"], expected["model"])
        moments = [each["optimizer"].state_dict()["state"][0]["exp_avg"] for each in (other, expected)]
        assert torch.equal(*moments)
        # The optimizer continues with the parameters of the module.
        assert other["optimizer"].param_groups[0]["params"][0] is other["model"][0].weight
        assert other["sampler"].position == 3


class TestErrors:
    def test_a_state_that_cannot_be_read_again_is_refused_at_once(self, tmp_path):
        with pytest.raises(OutputError, match=r"sampler\.pt cannot be saved: .*numpy"):
            CheckpointIO().save(None, tmp_path, sampler=Sampler(np.arange(3)))
        assert list(tmp_path.iterdir()) == []

    @pytest.fixture
    def blocked(self, tmp_path):
        (tmp_path / "file").touch()
        return tmp_path / "file" / "run"

    def test_an_error_of_the_background_is_raised_once(self, tmp_path, blocked):
        io = CheckpointIO()
        for after in (io.wait, lambda: io.save(None, tmp_path, model(0))):
            io.save(None, blocked, model(0))
            with pytest.raises(OutputError, match="cannot write"):
                after()
            io.wait()
        with pytest.raises(OutputError):
            io.save(None, blocked, model(0), async_io=False)

    @pytest.mark.slow
    def test_exit_waits_for_the_writing_and_prints_its_error(self, tmp_path, blocked):
        script = (
            "import sys, time, torch; from opensora_cli.community import checkpoint\n"
            "write = checkpoint.write_share\n"
            "checkpoint.write_share = lambda *given: (time.sleep(0.3), write(*given))\n"
            "for folder in sys.argv[1:]:\n"
            "    checkpoint.CheckpointIO().save(None, folder, torch.nn.Linear(2, 2), global_step=4)\n"
        )
        command = [sys.executable, "-c", script, str(tmp_path / "run"), str(blocked)]
        environment = os.environ | {"PYTHONPATH": str(Path(checkpoint.__file__).parents[2])}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert len(open_checkpoint(tmp_path / "run" / "epoch0-global_step4").entries) == 2
        assert done.stderr.startswith("error: the last checkpoint is lost: cannot write")
        assert "Traceback" not in done.stderr

    def test_folders_that_do_not_fit_are_refused(self, tmp_path):
        saved, io = run(0), CheckpointIO()
        folder = Path(io.save(None, tmp_path, saved["model"], optimizer=saved["optimizer"], async_io=False))
        with pytest.raises(RequestError, match="ema"):  # without a question to the network
            io.load(None, folder, ema=model(1))
        with pytest.raises(CheckpointError, match=r"sampler\.pt does not exist"):
            io.load(None, folder, sampler=Sampler())
        with pytest.raises(CheckpointError, match=r"optimizer\.pt is broken or of another run"):
            io.load(None, folder, optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters()))
        (folder / "sampler.pt").write_bytes(b"PK\x03\x04")
        with pytest.raises(CheckpointError, match=r"sampler\.pt is truncated"):
            io.load(None, folder, sampler=Sampler())
        running = folder / "running_states.json"
        for content in ("", "[1]", "{", '{"schema": "osora.running-states/3"}'):
            running.write_text(content)
            with pytest.raises(CheckpointError, match="running_states"):
                io.load(None, folder)
        running.unlink()
        with pytest.raises(CheckpointError, match=r"running_states\.json is missing"):
            io.load(None, folder)


@pytest.mark.parametrize(
    "endpoint", ["https://me:secret@[", "nonsense", "ftp://me:secret@host", "http://me:secret@127.0.0.1:1"]
)
def test_a_hub_that_cannot_be_asked_is_one_line_without_the_password(monkeypatch, tmp_path, endpoint):
    connect(FakeHub(endpoint=endpoint), monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # huggingface_hub waits between attempts
    with pytest.raises(CheckpointError, match="cannot be fetched from the Hugging Face Hub: ") as caught:
        load_from_hf_hub("owner/repo/a.safetensors", cache_dir=str(tmp_path))
    assert "secret" not in caught.value.message
    assert caught.value.message.isprintable()


def test_old_checkpoints_are_removed(tmp_path):
    for step in (2, 10, 9):
        CheckpointIO().save(None, tmp_path, model(0), global_step=step, async_io=False)
    rm_checkpoints(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3
    rm_checkpoints(str(tmp_path), keep_n_latest=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch0-global_step10", "epoch0-global_step9"]
