"""Who is frozen or hung, by the launcher's own time: processes are real, and the clock is not."""

import os
import signal
import sys
import time

import psutil
import pytest

from opensora_cli.core.rank_link import OwnTime, Pulse
from opensora_cli.engine.launch.launcher import Pace, _Run
from opensora_cli.engine.launch.process import RankProcess

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks are started on Linux and macOS only")

ASLEEP = "import os, signal, sys; os.mkdir(sys.argv[1]); signal.pause()"
DEAF = "import os, signal, sys, time; signal.signal(2, signal.SIG_IGN); os.mkdir(sys.argv[1]); time.sleep(20)"
"""As one that waits for another in a call that SIGINT does not end; by itself it ends well, much later."""


class Machine:
    """A launcher with ranks that sleep, on a machine whose clock is set by hand."""

    def __init__(self, folder, pace, program=ASLEEP):
        self.clock_s, self.delays_s = 0.0, 0.0
        self._pace = pace
        own_time = OwnTime(2 * pace.look_s, clock=lambda: self.clock_s, delays=lambda: self.delays_s)
        self.run = _Run(pace, own_time=own_time)
        for rank in range(2):
            asleep, log = folder / f"asleep{rank}", folder / f"rank{rank}.log"
            command = [sys.executable, "-c", program, str(asleep)]
            self.run._ranks.append(RankProcess(rank, command, os.environ, log, own_time=own_time))
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
                    rank._last_sign = self.run._time.now()
            if causes := self.run.look():
                return [cause.failure.message for cause in causes], self.clock_s - started
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


def test_a_rank_that_is_not_stopped_has_a_minute(machine):
    messages, seconds = machine.causes_within(100.0)
    assert [message.split(": ")[1] for message in messages] == ["frozen, no sign of life for 60 s"] * 2
    assert seconds == pytest.approx(59.0, abs=1.5)


@pytest.mark.parametrize("has_begun", [False, True], ids=["had not begun", "had ended"])
def test_a_rank_that_waits_for_one_that_is_gone_is_not_waited_for(tmp_path, has_begun):
    machine = Machine(tmp_path, Pace(interrupt_s=0.2, terminate_s=5.0, follow_s=0.2), DEAF)
    machine.ranks[0].stage = "load"
    if has_begun:
        machine.ranks[1].stage = "load"
        machine.ranks[1].kill()
    with machine.run:
        machine.run.end(finish_s=3600.0)
    assert [rank.exit_code() for rank in machine.ranks] == [-signal.SIGTERM, -signal.SIGKILL]


LATE, STARVED, WAITING = Pulse(is_late=True), Pulse(moves=1), Pulse(is_late=True, waits=True, moves=2)


@pytest.mark.parametrize(
    ("pulses", "behind"),
    [
        pytest.param((WAITING, STARVED), None, id="one that waits for one that is starved"),
        pytest.param((WAITING, LATE), 1, id="one that waits for one that is late"),
        pytest.param((WAITING, Pulse(is_idle=True)), 1, id="one that waits for one that does nothing"),
        pytest.param((WAITING, WAITING), 0, id="all wait"),
        pytest.param((STARVED, LATE), 1, id="one that is late alone"),
        pytest.param((STARVED, Pulse(is_idle=True)), None, id="one that has nothing to do"),
    ],
)
def test_a_rank_that_waits_is_late_only_with_the_others(machine, pulses, behind):
    for rank, pulse in zip(machine.ranks, pulses, strict=True):
        rank.pulse = pulse
    messages = [cause.failure.message.split(" on ")[0] for cause in machine.run.look()]
    assert messages == ([] if behind is None else [f"rank {behind}"])


def test_time_of_waiting_for_a_processor_does_not_count():
    clock = iter([0.0, 1.0, 2.0, 3.0])
    delays = iter([0.0, 0.9, 1.8, 3.8])
    own_time = OwnTime(2.0, clock=lambda: next(clock), delays=lambda: next(delays))
    assert [round(own_time.look(), 3) for _ in range(3)] == [0.1, 0.2, 0.2]
