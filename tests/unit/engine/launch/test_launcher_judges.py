"""Who is frozen or hung, by the launcher's own time: processes are real, and the clock is not."""

import os
import signal
import sys
import time
from dataclasses import replace

import psutil
import pytest

from opensora_cli.core.rank_link import Heartbeat
from opensora_cli.engine.launch.launcher import Pace, _Run
from opensora_cli.engine.launch.process import RankProcess

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks are started on Linux and macOS only")

ASLEEP = "import os, signal, sys; os.mkdir(sys.argv[1]); signal.pause()"
DEAF = "import os, signal, sys, time; signal.signal(2, signal.SIG_IGN); os.mkdir(sys.argv[1]); time.sleep(20)"
"""As one that waits for another in a call that SIGINT does not end; by itself it ends well, much later."""


class Machine:
    """A launcher with ranks that sleep, on a machine whose clock is set by hand."""

    def __init__(self, folder, pace, program=ASLEEP):
        self.clock_s = 0.0
        self._pace = pace
        self.run = _Run(pace, clock=lambda: self.clock_s)
        for rank in range(2):
            asleep, log = folder / f"asleep{rank}", folder / f"rank{rank}.log"
            command = [sys.executable, "-c", program, str(asleep)]
            self.run._ranks.append(RankProcess(rank, command, os.environ, log))
        self.ranks = self.run._ranks
        while not all((folder / f"asleep{rank.rank}").exists() and sleeps(rank) for rank in self.ranks):
            time.sleep(0.01)

    def causes_within(self, seconds, *, late=1.0, beats_every=None):
        """Return the first causes within so many seconds by the clock, and when: each look comes `late` times as late
        as planned."""
        started, beaten = self.clock_s, self.clock_s
        while self.clock_s < started + seconds:
            self.clock_s += late * self._pace.look_s
            if beats_every and self.clock_s >= beaten + beats_every:
                beaten = self.clock_s
                for rank in self.ranks:
                    rank.state = replace(rank.state, moves=rank.state.moves + 1)
            if causes := self.run.look():
                return [cause.message for cause in causes], self.clock_s - started
        return [], seconds


def sleeps(rank):
    return psutil.Process(rank.pid).status() == psutil.STATUS_SLEEPING


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path, Pace())
    with machine.run:
        machine.run.look()
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


def test_where_every_look_is_late_a_rank_has_longer(machine):
    stop(machine.ranks[1])
    assert machine.causes_within(20.0, late=10.0) == ([], 20.0)
    assert machine.causes_within(20.0, late=10.0)[0]


def test_a_rank_that_is_stopped_for_a_moment_is_not_frozen(machine):
    stop(machine.ranks[0])
    assert machine.causes_within(4.0)[0] == []
    os.kill(machine.ranks[0].pid, signal.SIGCONT)
    assert machine.causes_within(20.0)[0] == []


@pytest.mark.parametrize(("late", "beats_every"), [(1.0, 30.0), (20.0, 150.0), (100.0, 500.0)])
def test_slow_signs_of_life_on_a_busy_machine_are_no_failure(machine, late, beats_every):
    assert machine.causes_within(3 * beats_every, late=late, beats_every=beats_every)[0] == []


def test_a_launcher_that_was_stopped_itself_blames_nobody(machine):
    stop(machine.ranks[0])
    stop(machine.ranks[1])
    machine.clock_s += 3600.0
    assert machine.run.look() == []


def test_ranks_without_a_sign_of_work_have_a_minute(machine):
    messages, seconds = machine.causes_within(100.0)
    assert [message.split(": ")[1] for message in messages] == ["no progress for 60 s"]
    assert seconds == pytest.approx(60.0, abs=1.5)


def test_a_rank_that_works_is_late_after_three_times_the_time_of_an_idle_one(machine):
    for rank in machine.ranks:
        rank.state = Heartbeat(stage="denoise", idle_s=1e9, late_s=180.0)
    [message], seconds = machine.causes_within(300.0)
    assert message.split(": ")[1] == "no progress for 180 s"
    assert seconds == pytest.approx(180.0, abs=1.5)


def test_processor_time_is_work_except_where_it_polls_a_gpu(machine):
    working, polling = machine.ranks
    for rank in machine.ranks:
        rank._work = iter(range(10**6)).__next__
        rank.state = Heartbeat(stage="denoise", on_device=True)
    polling._on_gpu = True
    for _ in range(700):
        machine.clock_s += 0.1
        machine.run.look()
    assert (working.is_idle, polling.is_idle) == (False, True)


@pytest.mark.parametrize("has_begun", [False, True], ids=["had not begun", "had ended"])
def test_a_rank_that_waits_for_one_that_is_gone_is_not_waited_for(tmp_path, has_begun):
    machine = Machine(tmp_path, Pace(interrupt_s=0.2, terminate_s=5.0, follow_s=0.2), DEAF)
    machine.ranks[0].state = Heartbeat(stage="load")
    if has_begun:
        machine.ranks[1].state = Heartbeat(stage="load")
        machine.ranks[1].kill()
    with machine.run:
        machine.run.end(finish_s=3600.0)
    assert [rank.exit_code() for rank in machine.ranks] == [-signal.SIGTERM, -signal.SIGKILL]


LATE, IDLE, STARVED = (0.0, 99.0), (99.0, 0.0), (0.0, 0.0)
"""Seconds without work and without progress."""


@pytest.mark.parametrize(
    ("first", "second", "behind"),
    [
        pytest.param((LATE, True), (STARVED, False), None, id="one that waits for one that is starved"),
        pytest.param((LATE, True), (LATE, False), 1, id="one that waits for one that is late"),
        pytest.param((LATE, True), (IDLE, False), 1, id="one that waits for one that does nothing"),
        pytest.param((LATE, True), (LATE, True), 0, id="all wait"),
        pytest.param((STARVED, False), (LATE, False), 1, id="one that is late alone"),
        pytest.param((STARVED, False), (IDLE, False), None, id="one that has nothing to do"),
    ],
)
def test_a_rank_that_waits_is_late_only_with_the_others(machine, first, second, behind):
    for rank, ((rank.idle_s, rank.still_s), waits) in zip(machine.ranks, (first, second), strict=True):
        rank.state = Heartbeat(stage="denoise", late_s=90.0, waits=waits)
    messages = [failure.message.split(" on ")[0] for failure in machine.run._failures()]
    assert messages == ([] if behind is None else [f"rank {behind}"])
