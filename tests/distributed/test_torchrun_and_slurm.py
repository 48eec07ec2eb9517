"""Ranks that torchrun or Slurm starts, not our launcher."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RANK = str(HERE / "launch_rank.py")


@pytest.fixture
def environment():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}


def job_with_a_free_port():
    for job in range(os.getpid(), os.getpid() + 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 12_000 + job % 20_000)):
                return str(job)
    pytest.fail("no free port")


def test_slurm(tmp_path, environment):
    slurm = {
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
        "SLURM_JOB_ID": job_with_a_free_port(),
        "SLURM_STEP_ID": "0",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, RANK, str(tmp_path), "--gloo"],
            env={**environment, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert outputs == [f"result of rank {rank} of 2 on 1\n" for rank in range(2)]
    assert [rank.returncode for rank in ranks] == [0, 0]


@pytest.mark.slow
def test_torchrun(tmp_path, environment):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, RANK, str(tmp_path), "--gloo"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"result of rank {rank} of 2 on 1" for rank in range(2)]
