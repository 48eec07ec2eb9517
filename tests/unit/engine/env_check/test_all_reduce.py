"""The all-reduce in processes of its own: hung, failed, and nothing left behind (done: tests/cli/test_env_check.py)."""

import os
import sys
import time

import psutil
import pytest

from opensora_cli.engine.env_check import all_reduce
from opensora_cli.engine.env_check.all_reduce import Outcome, check_all_reduce, run_all_reduce
from opensora_cli.engine.env_check.report import Severity


def run(code, *, seconds=10.0, gpus=2, environment=None):
    return run_all_reduce(
        num_gpus=gpus,
        seconds=seconds,
        environment=environment or dict(os.environ),
        worker=(sys.executable, "-S", "-c", code),
    )


def test_a_hang_is_reported_and_ended(tmp_path):
    # Each starts a child, as torch does with threads and helpers: those must end, too.
    code = f"""
import os, sys, time, subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
open({str(tmp_path)!r} + "/" + sys.argv[1], "w").write(f"{{os.getpid()}} {{child.pid}}")
print("connecting", flush=True)
if sys.argv[1] == "0":
    print("reducing", flush=True)
time.sleep(600)
"""
    result = run(code, seconds=3.0)
    assert (result.outcome, result.stage, result.ranks) == (Outcome.HUNG, "connecting", 2)
    pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    assert len(pids) == 4
    end = time.monotonic() + 10
    while any(map(_runs, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert [pid for pid in pids if _runs(pid)] == []
    (finding,) = check_all_reduce(result)
    assert finding.severity is Severity.PROBLEM
    assert "hangs while connecting: ended after 3 s" in finding.message


def test_too_slow_to_begin_is_no_hang():
    result = run("import time; time.sleep(600)", seconds=0.5)
    assert result.outcome is Outcome.NOT_STARTED
    (finding,) = check_all_reduce(result)
    assert finding.severity is Severity.UNKNOWN


def test_one_that_fails_ends_the_others():
    code = """
import sys, time
print("connecting", flush=True)
if sys.argv[1] == "1":
    raise RuntimeError("no such interface: ib7")
time.sleep(600)
"""
    start = time.monotonic()
    result = run(code, seconds=60.0)
    assert time.monotonic() - start < 50  # it did not wait for the limit
    assert (result.outcome, result.stage) == (Outcome.FAILED, "connecting")
    (finding,) = check_all_reduce(result)
    assert finding.message.endswith("nccl over 2 GPUs fails while connecting: RuntimeError: no such interface: ib7")


def test_ctrl_c_leaves_no_process(tmp_path, monkeypatch):
    code = f"""
import os, sys, time
open({str(tmp_path)!r} + "/" + sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""

    def wait_and_press(seconds):
        if len(list(tmp_path.iterdir())) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(all_reduce.time, "sleep", wait_and_press)
    with pytest.raises(KeyboardInterrupt):
        run(code, seconds=60.0)
    assert [path.name for path in tmp_path.iterdir() if path.read_text() and _runs(int(path.read_text()))] == []


@pytest.mark.parametrize(("gpus", "severity"), [(8, Severity.PROBLEM), (1, Severity.WARNING), (0, Severity.WARNING)])
def test_a_failure_is_a_problem_only_for_several_gpus(gpus, severity):
    result = run("raise SystemExit('broken')", gpus=gpus)
    (finding,) = check_all_reduce(result)
    assert finding.severity is severity


@pytest.mark.slow
def test_an_interface_that_does_not_exist_is_found_out():
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "nowhere0"}
    result = run_all_reduce(num_gpus=0, seconds=120, environment=environment)
    assert result.outcome is Outcome.FAILED
    assert "nowhere0" in result.reason


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
