"""The all-reduce in a process of its own: hung, failed, interrupted (success: tests/cli/test_env_check.py)."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from opensora_cli.engine.env_check.check import check_all_reduce
from opensora_cli.engine.env_check.report import Finding, Severity


def run(code: str, *, seconds: float = 10.0, gpus: int = 2) -> Finding:
    command = (sys.executable, "-S", "-c", code)
    (finding,) = check_all_reduce(num_gpus=gpus, seconds=seconds, environment=os.environ, command=command)
    return finding


def hanging(folder: Path) -> str:
    """Return code that starts a child, writes both process numbers and hangs."""
    return f"""
import os, sys, time, subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
open({str(folder / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""


def assert_ended(folder: Path) -> None:
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == 2
    end = time.monotonic() + 10
    while any(map(runs, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert [pid for pid in pids if runs(pid)] == []


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_hang_is_reported_and_ended(tmp_path: Path) -> None:
    finding = run(hanging(tmp_path), seconds=1.0)
    assert finding.severity is Severity.PROBLEM
    assert finding.message == "nccl over 2 GPUs does not end within 1 s"
    assert_ended(tmp_path)


def test_an_interrupt_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    communicate = subprocess.Popen.communicate

    def interrupted(self: subprocess.Popen[str], timeout: float | None = None) -> tuple[str, str]:
        if timeout == 60.0:
            while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
                time.sleep(0.05)
            raise KeyboardInterrupt
        return communicate(self, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(hanging(tmp_path), seconds=60.0)
    assert_ended(tmp_path)


@pytest.mark.parametrize(("gpus", "severity"), [(8, Severity.PROBLEM), (1, Severity.WARNING), (0, Severity.WARNING)])
def test_a_failure_is_a_problem_only_for_several_gpus(gpus: int, severity: Severity) -> None:
    finding = run("raise SystemExit('error: no such interface: ib7')", gpus=gpus)
    assert finding.severity is severity
    assert finding.message.endswith("fails: no such interface: ib7")


@pytest.mark.slow
def test_an_interface_that_does_not_exist_is_found() -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "nowhere0"}
    (finding,) = check_all_reduce(num_gpus=0, seconds=120, environment=environment)
    assert finding.severity is Severity.WARNING
    assert "nowhere0" in finding.message
