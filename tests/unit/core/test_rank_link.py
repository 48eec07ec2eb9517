"""What a rank tells where our launcher did not start it: nothing, but silence ends it there, too."""

import subprocess
import sys

import pytest

from opensora_cli.core.rank_link import beat, linked, report_bug, report_failure
from opensora_cli.core.ranks import RankContext

CONTEXT = RankContext(rank=1, local_rank=1, world_size=2, nnodes=1, master_addr="localhost", master_port=1)

SILENT = """
import time
from opensora_cli.core.rank_link import beat, linked
from opensora_cli.core.ranks import RankContext
context = RankContext(rank=1, local_rank=1, world_size=2, nnodes=1, master_addr="localhost", master_port=1)
with linked(context, silence_s=0.5, silent_steps=3):
    beat("load")
    time.sleep(1.2)  # as long as it takes
    beat("denoise", {step_s})
    time.sleep({sleep_s})
    beat("decode")
    print("decoded", flush=True)
"""


@pytest.mark.parametrize("context", [None, CONTEXT])
def test_without_launcher_errors_are_told_by_the_caller(context):
    with linked(context):
        beat("denoise", 1.0)
        assert not report_failure("no luck", exit_code=4)
        assert not report_bug(ValueError("no luck"))


def test_outside_of_a_link():
    beat("denoise", 1.0)
    assert not report_failure("no luck", exit_code=4)


def run_silent(**numbers):
    code = SILENT.format(**numbers)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_silence_ends_a_rank():
    done = run_silent(step_s=0.01, sleep_s=60)
    assert done.returncode == 4
    assert done.stdout == ""
    assert done.stderr.startswith("error: rank 1 on ")
    assert ", in the stage denoise: no progress for " in done.stderr


def test_ten_times_a_long_step_is_no_silence():
    done = run_silent(step_s=20.0, sleep_s=1.2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "decoded\n", "")
