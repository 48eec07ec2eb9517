"""Ranks that torchrun or Slurm starts, not our launcher."""

import os
import socket
import subprocess
import sys

import launch_rank
import pytest

pytestmark = pytest.mark.usefixtures("no_ranks_around")


def job_with_a_free_port():
    for job in range(os.getpid(), os.getpid() + 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 12_000 + job % 20_000)):
                return str(job)
    pytest.fail("no free port")


def test_slurm(tmp_path, processes, monkeypatch):
    slurm = {
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
        "SLURM_JOB_ID": job_with_a_free_port(),
        "SLURM_STEP_ID": "0",
    }
    ranks = []
    for rank in range(2):
        for name, value in {**slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}.items():
            monkeypatch.setenv(name, value)
        ranks.append(processes.program(tmp_path, launch_rank.main, [str(tmp_path), "--gloo"]))
    assert [rank.end(60.0)[:2] for rank in ranks] == [(0, f"result of rank {rank} of 2 on 1\n") for rank in range(2)]


@pytest.mark.slow
def test_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, launch_rank.__file__, str(tmp_path), "--gloo"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"result of rank {rank} of 2 on 1" for rank in range(2)]
