"""Which ranks are stopped or hung, by the looks of the launcher: processes are real, and the time is not."""

import os
import signal
import sys
import time
from dataclasses import replace

import psutil
import pytest

from opensora_cli.core.ranks import Heartbeat
from opensora_cli.engine.launch import launcher
from opensora_cli.engine.launch.launcher import LOOK_S, _Run
from opensora_cli.engine.launch.process import RankProcess

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks are started on Linux and macOS only")

ASLEEP = "import os, signal, sys; os.mkdir(sys.argv[1]); signal.pause()"
DEAF = "import os, signal, sys, time; signal.signal(2, signal.SIG_IGN); os.mkdir(sys.argv[1]); time.sleep(20)"
"""As one that waits for another in a call that SIGINT does not end; by itself it ends well, much later."""


class Machine:
    """A launcher with ranks that sleep."""

    def __init__(self, folder, program=ASLEEP):
        self.run = _Run()
        for rank in range(2):
            asleep, log = folder / f"asleep{rank}", folder / f"rank{rank}.log"
            command = [sys.executable, "-c", program, str(asleep)]
            self.run._ranks.append(RankProcess(rank, command, os.environ, log))
        self.ranks = self.run._ranks
        while not all((folder / f"asleep{rank.rank}").exists() and sleeps(rank) for rank in self.ranks):
            time.sleep(0.01)

    def causes_within(self, seconds, *, beats_every=None):
        """Return the first causes within the looks of so many seconds, and after how many."""
        for look in range(1, round(seconds / LOOK_S) + 1):
            passed_s = look * LOOK_S
            if beats_every and passed_s % beats_every < LOOK_S:
                self.set(moves=look)
            if causes := self.run.look(LOOK_S):
                return [cause.message for cause in causes], passed_s
        return [], seconds

    def set(self, **changes):
        for rank in self.ranks:
            rank.state = replace(rank.state, **changes)


def sleeps(rank):
    return psutil.Process(rank.pid).status() == psutil.STATUS_SLEEPING


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    with machine.run:
        machine.run.look(0.1)
        yield machine


def stop(rank):
    os.kill(rank.pid, signal.SIGSTOP)
    while not rank.is_stopped():
        time.sleep(0.01)


def test_a_stopped_rank_is_found_in_a_third_of_what_is_promised(machine):
    stop(machine.ranks[1])
    [message], seconds = machine.causes_within(20.0)
    assert "rank 1 on " in message
    assert "stopped (SIGSTOP), no sign of life for 5 s" in message
    assert seconds == pytest.approx(5.0, abs=0.5)


def test_a_rank_that_is_stopped_for_a_moment_is_not_frozen(machine):
    stop(machine.ranks[0])
    assert machine.causes_within(4.0)[0] == []
    os.kill(machine.ranks[0].pid, signal.SIGCONT)
    assert machine.causes_within(20.0)[0] == []


@pytest.mark.parametrize(
    ("step_s", "on_gpu", "limit_s"), [(None, False, 60), (0.2, False, 12), (3.0, False, 30), (0.2, True, 60)]
)
def test_ranks_without_a_sign_of_work_hang(machine, step_s, on_gpu, limit_s):
    machine.set(stage="denoise", step_s=step_s)
    for rank in machine.ranks:
        rank._on_gpu = on_gpu
    messages, seconds = machine.causes_within(100.0)
    assert [message.split(": ")[1] for message in messages] == [f"no progress for {limit_s} s"]
    assert seconds == pytest.approx(limit_s, abs=1.5)


def test_slow_signs_of_life_are_no_failure(machine):
    assert machine.causes_within(120.0, beats_every=50.0)[0] == []


def test_processor_time_is_work_except_between_steps_of_a_gpu(machine):
    working, polling = machine.ranks
    for rank in machine.ranks:
        rank._processor_time = iter(range(10**6)).__next__
        rank.state = Heartbeat(stage="denoise", step_s=1.0)
    polling._on_gpu = True
    machine.causes_within(70.0)
    assert (working.is_idle, polling.is_idle) == (False, True)
    polling._disk_bytes = iter(range(10**6)).__next__
    machine.causes_within(1.0)
    assert not polling.is_idle


def test_child_processes_that_work_are_a_sign_of_work_also_after_their_end(tmp_path):
    first, second = (f"import time\nwhile time.process_time() < {seconds}: pass" for seconds in (0.6, 99))
    parent = f"import subprocess, sys\nfor each in {first!r}, {second!r}: subprocess.run([sys.executable, '-c', each])"
    rank = RankProcess(0, [sys.executable, "-c", parent], os.environ, tmp_path / "log")
    try:
        while sum(psutil.Process(rank.pid).cpu_times()[2:4]) < 0.5:
            time.sleep(0.1)
        rank._children_s = 0.3  # from a look at the first one
        assert rank.has_hidden_work()
        rank._signal_group(signal.SIGSTOP)
        rank.has_hidden_work()
        assert not rank.has_hidden_work()
    finally:
        rank.kill()
        rank.close()


def test_work_of_children_before_the_half_of_the_limit_does_not_count(machine):
    machine.set(stage="train", step_s=0.1)
    for rank in machine.ranks:
        rank._hidden_work = lambda: (100.0, False)
    assert machine.causes_within(20.0)[1] == pytest.approx(12.0, abs=1.5)


@pytest.mark.parametrize("has_begun", [False, True], ids=["had not begun", "had ended"])
def test_a_rank_that_waits_for_one_that_is_gone_is_not_waited_for(tmp_path, monkeypatch, has_begun):
    for name, seconds in (("INTERRUPT_S", 0.2), ("TERMINATE_S", 5.0), ("FOLLOW_S", 0.2)):
        monkeypatch.setattr(launcher, name, seconds)
    machine = Machine(tmp_path, DEAF)
    machine.ranks[0].state = Heartbeat(stage="load")
    if has_begun:
        machine.ranks[1].state = Heartbeat(stage="load")
        machine.ranks[1].kill()
    with machine.run:
        machine.run.end(finish_s=3600.0)
    assert [rank.exit_code() for rank in machine.ranks] == [-signal.SIGTERM, -signal.SIGKILL]


IDLE, WORKS = 99.0, 0.0
"""Seconds without a sign of work."""


@pytest.mark.parametrize(
    ("first", "second", "behind"),
    [
        pytest.param((IDLE, True), (WORKS, False), None, id="one that waits for one that works"),
        pytest.param((IDLE, True), (IDLE, False), 1, id="one that waits for one that does nothing"),
        pytest.param((IDLE, True), (IDLE, True), 0, id="all wait"),
    ],
)
def test_a_rank_that_waits_hangs_only_with_the_others(machine, first, second, behind):
    for rank, (idle_s, waits) in zip(machine.ranks, (first, second), strict=True):
        rank.idle_s, rank.state = idle_s, Heartbeat(stage="denoise", waits=waits)
        rank._signs = rank.state.moves, rank._disk_bytes(), rank._processor_time()
    messages = [failure.message.split(" on ")[0] for failure in machine.run.look(0.1)]
    assert messages == ([] if behind is None else [f"rank {behind}"])
