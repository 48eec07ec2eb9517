"""What a rank reports to its launcher."""

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from opensora_cli.core.ranks import (
    CHANNEL_VARIABLE,
    RankContext,
    beat,
    current_stage,
    linked,
    report_bug,
    report_failure,
    report_left,
)

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
