"""Which rank a process is, from the environment of torchrun and of Slurm, and what it reports to its launcher."""

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.ranks import (
    CHANNEL_VARIABLE,
    LOG_VARIABLE,
    RankContext,
    beat,
    current_stage,
    find_context,
    first_host,
    is_of_launcher,
    linked,
    report_bug,
    report_failure,
    report_left,
)

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "node[03-04]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


class TestAlone:
    @pytest.mark.parametrize(
        "environment",
        [
            {},
            {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
            without(SLURM, "SLURM_STEP_ID"),  # the script of a batch job
            {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"},
        ],
    )
    def test_is_no_rank(self, environment):
        assert find_context(environment) is None


class TestTorchrun:
    def test_found(self):
        assert find_context(TORCHRUN) == RankContext(
            rank=5, local_rank=1, world_size=8, nnodes=2, master_addr="node0", master_port=29500
        )

    def test_counts_before_slurm(self):
        context = find_context({**SLURM, **TORCHRUN, "RANK": "7"})
        assert context.rank == 7
        assert context.master_addr == "node0"

    def test_ranks_of_our_launcher_meet_by_a_file_and_need_no_address(self):
        environment = without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT") | {"OSORA_RANK_STORE": "/private/store"}
        context = find_context(environment)
        assert context.store == Path("/private/store")
        assert find_context({**environment, "MASTER_ADDR": "node0", "MASTER_PORT": "no number"}) == context

    @pytest.mark.parametrize("missing", ["RANK", "MASTER_PORT"])
    def test_half_set(self, missing):
        with pytest.raises(RequestError, match=f"but {missing} is not") as caught:
            find_context(without(TORCHRUN, missing))
        assert "unset" in caught.value.hint

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"RANK": "8"}, "RANK=8 contradicts WORLD_SIZE=8"),
            ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many' must be a whole number"),
            ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 must be 1 to 65535"),
            ({"GROUP_WORLD_SIZE": "3"}, "different numbers of ranks: 8 on 3$"),
        ],
    )
    def test_contradictions(self, changes, message):
        with pytest.raises(RequestError, match=message):
            find_context({**TORCHRUN, **changes})


class TestSlurm:
    def test_found(self):
        assert find_context(SLURM) == RankContext(
            rank=5, local_rank=1, world_size=8, nnodes=2, master_addr="node03", master_port=12000 + 1234567 % 20000
        )

    def test_a_step_smaller_than_its_job(self):
        step = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node04"}
        context = find_context({**SLURM, **step})
        assert (context.world_size, context.nnodes, context.master_addr) == (6, 1, "node04")

    @pytest.mark.parametrize("missing", ["SLURM_LOCALID", "SLURM_NTASKS"])
    def test_half_set(self, missing):
        with pytest.raises(RequestError, match=f"SLURM_PROCID is set, but {missing} is not"):
            find_context(without(SLURM, missing))

    def test_contradictions(self):
        with pytest.raises(RequestError, match="SLURM_PROCID=8 contradicts SLURM_NTASKS=8"):
            find_context({**SLURM, "SLURM_PROCID": "8"})
        with pytest.raises(RequestError, match=r"different numbers of ranks: 8 on 3$"):
            find_context({**SLURM, "SLURM_NNODES": "3"})

    @pytest.mark.parametrize(
        ("nodelist", "first"),
        [
            ("login", "login"),
            ("node[01-04,7]", "node01"),
            ("node[7,01-04],login", "node7"),
            ("rack[2-3]-n[08-10].example.org,x", "rack2-n08.example.org"),
        ],
    )
    def test_first_host(self, nodelist, first):
        assert first_host(nodelist) == first

    @pytest.mark.parametrize("nodelist", ["", ",a", "node[a-b]"])
    def test_no_list_of_hosts(self, nodelist):
        with pytest.raises(RequestError, match="SLURM_NODELIST"):
            first_host(nodelist)


def test_what_the_launcher_wrote_lies_beside_the_log_of_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logs = {**TORCHRUN, LOG_VARIABLE: str(tmp_path / "logs" / "rank0.log")}
    assert is_of_launcher(Path("logs/settings.json"), logs)
    assert not is_of_launcher(Path("settings.json"), logs)
    assert not is_of_launcher(Path("logs/settings.json"), TORCHRUN)


CONTEXT = RankContext(rank=1, local_rank=1, world_size=2, nnodes=1, master_addr="localhost", master_port=1)


def test_without_a_launcher_the_caller_reports_errors():
    assert current_stage() is None
    beat("denoise", 1.0)
    with linked(CONTEXT):
        assert current_stage() == "start"
        beat("denoise", 1.0)
        assert current_stage() == "denoise"
        assert not report_failure("no luck", exit_code=4)
        assert not report_bug(ValueError("no luck"))
        assert not report_left(lambda: pytest.fail("nobody asks"))


WORKING = """
import threading, time
from pathlib import Path
from opensora_cli.core import ranks
from opensora_cli.core.ranks import RankContext
context = RankContext(
    rank=1, local_rank=1, world_size=2, nnodes=1, store=Path("store"), log=Path({log!r})
)
lock = threading.Lock()
lock.acquire()

def compute():
    start = time.monotonic()
    while time.monotonic() < start + 3.5:
        {between}

with ranks.linked(context):
    {before}
"""


def states(log, before, between="time.sleep(0.01)"):
    """Return the states that a rank reports while it works for more than 3 s; its launcher is not stopped."""
    ours, theirs = socket.socketpair()
    code = WORKING.format(before=before, between=between, log=str(log))
    environment = {**os.environ, CHANNEL_VARIABLE: str(theirs.fileno())}
    with ours, theirs:
        rank = subprocess.Popen([sys.executable, "-c", code], env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        received = b""
        with suppress(ConnectionError):
            while chunk := ours.recv(4096):
                received += chunk
        assert rank.wait(timeout=60) == 0
    return [message["beat"] for message in map(json.loads, received.splitlines()) if "beat" in message]


@pytest.mark.slow
def test_a_rank_reports_its_progress_every_second(tmp_path):
    received = states(tmp_path / "log", "ranks.beat('denoise', 0.2); compute()", between="ranks.move()")
    assert len(received) >= 3
    assert received[0]["stage"] == "start"
    last = received[-1]
    assert (last["stage"], last["step_s"]) == ("denoise", 0.2)
    assert last["moves"] > received[1]["moves"]


@pytest.mark.slow
def test_a_rank_in_a_collective_reports_that_it_waits(tmp_path):
    """Known by the module whose function waits."""
    waiting = "exec('lock.acquire(timeout=3.5)', {'__name__': 'torch.distributed.some', 'lock': lock})"
    assert states(tmp_path / "log", waiting)[-1]["waits"]
