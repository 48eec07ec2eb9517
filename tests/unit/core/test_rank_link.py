"""What a rank reports to its launcher; without one, a step that takes too long ends the rank."""

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from opensora_cli.core.rank_link import (
    CHANNEL_VARIABLE,
    beat,
    current_stage,
    linked,
    report_bug,
    report_failure,
    report_left,
)
from opensora_cli.core.ranks import RankContext

CONTEXT = RankContext(rank=1, local_rank=1, world_size=2, nnodes=1, master_addr="localhost", master_port=1)

SILENT = """
import time
from opensora_cli.core import rank_link
from opensora_cli.core.ranks import RankContext
context = RankContext(rank=1, local_rank=1, world_size=2, nnodes=1, master_addr="localhost", master_port=1)
rank_link.SILENCE_S, rank_link._BEAT_S = 0.3, 0.1
with rank_link.linked(context):
    rank_link.beat("load")
    time.sleep(1.5)  # as long as it takes
    rank_link.beat("denoise", 0.01)
    time.sleep(60)
"""


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


def test_a_step_that_takes_far_too_long_ends_a_rank_without_a_launcher():
    done = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4
    assert done.stderr.startswith("error: rank 1 on ")
    assert ", in the stage denoise: no progress for " in done.stderr


WORKING = """
import threading, time
from opensora_cli.core import rank_link
from opensora_cli.core.ranks import RankContext
context = RankContext(
    rank=1, local_rank=1, world_size=2, nnodes=1, master_addr="localhost", master_port=1
)
lock = threading.Lock()
lock.acquire()

def compute():
    start = time.monotonic()
    while time.monotonic() < start + 3.5:
        {between}

with rank_link.linked(context):
    {before}
"""


def states(before, between="time.sleep(0.01)"):
    """Return the states that a rank reports while it works for more than 3 s; its launcher is not stopped."""
    ours, theirs = socket.socketpair()
    code = WORKING.format(before=before, between=between)
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
def test_a_rank_reports_its_progress_every_second():
    received = states("rank_link.beat('denoise', 0.2); compute()", between="rank_link.move()")
    assert len(received) >= 3
    assert received[0]["stage"] == "start"
    last = received[-1]
    assert (last["stage"], last["step_s"]) == ("denoise", 0.2)
    assert last["moves"] > received[1]["moves"]


@pytest.mark.slow
def test_a_rank_in_a_collective_reports_that_it_waits():
    """Known by the module whose function waits."""
    waiting = "exec('lock.acquire(timeout=3.5)', {'__name__': 'torch.distributed.some', 'lock': lock})"
    assert states(waiting)[-1]["waits"]
