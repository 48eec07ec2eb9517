"""Requests that contradict themselves, or ask for more than there is, are refused before anything starts."""

import os
import sys
from pathlib import Path

import pytest
import torch

from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.files import temporary_folder
from opensora_cli.engine.launch.launcher import LaunchRequest, log_folder, write_settings
from opensora_cli.engine.launch.process import RankFailure
from opensora_cli.settings.devices import ParallelSettings


def request(*, devices=None, **changes):
    given = {"gpus": 2, "device_type": "cpu", "log_dir": Path("logs"), "parallel": ParallelSettings(devices=devices)}
    return LaunchRequest(**{**given, **changes})


def test_gpus_are_not_picked_for_ranks_on_other_devices():
    with pytest.raises(RequestError, match="devices=0,1 picks GPUs, and the device is cpu"):
        request(devices=(0, 1)).check()
    with pytest.raises(RequestError, match="devices=0,1 picks GPUs, and the device is xpu"):
        request(devices=(0, 1), device_type="xpu").check()


@pytest.mark.parametrize(
    ("gpus", "devices", "count", "message"),
    [
        (3, None, 2, "gpus=3, and this machine has 2 usable NVIDIA GPUs"),
        (2, (0, 2), 2, "devices=0,2, and this machine has 2 usable NVIDIA GPUs"),
        (1, None, 0, "gpus=1, and this machine has no usable NVIDIA GPU"),
    ],
)
def test_more_gpus_than_there_are(monkeypatch, gpus, devices, count, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(HardwareError, match=message):
        request(gpus=gpus, devices=devices, device_type="cuda").check()


@pytest.mark.parametrize(
    ("seen", "expected"), [(None, "0,2"), ("4,5,6,7", "4,6"), ("GPU-a, GPU-b, GPU-c", "GPU-a,GPU-c")]
)
def test_picked_gpus(monkeypatch, seen, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    environment = request(device_type="cuda", devices=(0, 2)).environment(Path("store"))
    assert environment["CUDA_VISIBLE_DEVICES"] == expected
    assert request(device_type="cuda").environment(Path("store")).get("CUDA_VISIBLE_DEVICES") == seen


def test_several_machines_are_started_by_torchrun_or_srun():
    parallel = ParallelSettings(gpus=8, nnodes=2)
    with pytest.raises(RequestError, match="nnodes=2, and ranks are started here on this machine only") as caught:
        request(parallel=parallel, gpus=8).check()
    assert "torchrun --nnodes 2 --nproc-per-node 8 " in caught.value.hint


@pytest.mark.skipif(sys.platform == "win32", reason="ranks are started on Linux and macOS only")
class TestLogFolder:
    @pytest.fixture(autouse=True)
    def temporary(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def test_only_this_account_reads_the_settings_and_the_store(self):
        with log_folder("generate") as folder, temporary_folder() as private:
            settings = write_settings(folder, {"prompt": "a secret"})
            assert [path.stat().st_mode & 0o777 for path in (folder, private, settings)] == [0o700, 0o700, 0o600]

    def test_one_that_a_message_names_stays(self, tmp_path):
        def run():
            with log_folder("train") as folder:
                (folder / "rank0.log").touch()
                raise RankFailure("rank 0 died", hint=f"log: {folder}/rank0.log", exit_code=4)

        with pytest.raises(RankFailure) as caught:
            run()
        [kept] = tmp_path.iterdir()
        assert kept.name.startswith("osora-train-")
        assert os.listdir(kept) == ["rank0.log"]
        assert caught.value.hint == f"log: {kept}/rank0.log"
