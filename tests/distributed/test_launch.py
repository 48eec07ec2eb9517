"""Ranks that die, freeze, fail and are interrupted: the run ends in time, with one message, and leaves nothing.

Most ranks here need no torch (`launch_rank.py`), so that many ends can be tried in little time.
"""

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import launch_rank
import psutil
import pytest

from opensora_cli.cli import errors
from opensora_cli.core.limits import RANK_VARIABLE, VARIABLES
from opensora_cli.engine.launch import launcher
from opensora_cli.engine.launch.launcher import LaunchRequest, launch
from opensora_cli.engine.launch.process import RankFailure
from opensora_cli.settings.devices import ParallelSettings

COMMAND = (sys.executable, launch_rank.__file__)
PACE = {"LOOK_S": 0.05, "SETTLE_S": 1.0, "INTERRUPT_S": 2.0, "TERMINATE_S": 0.5}
PROMISED_S = 20.0

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="ranks are started on Linux and macOS only"),
    pytest.mark.usefixtures("no_ranks_around"),
]


def request(folder, **changes):
    fields = {"gpus": 2, "device_type": "cpu", "log_dir": folder / "logs", "output_dir": folder}
    return LaunchRequest(parallel=ParallelSettings(), **{**fields, **changes})


def run(folder, *arguments, pace=PACE, **changes):
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in pace.items():
            patch.setattr(launcher, name, seconds)
        launch(request(folder, **changes), [str(folder), *arguments], command=COMMAND)


def failing(folder, *arguments, **changes):
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run(folder, *arguments, **changes)
    assert time.monotonic() - start < PROMISED_S + 10.0  # the start of the ranks counts here too
    # What a rank started is killed with it, and then ends in its own time.
    wait_for(lambda: left(folder) == [], seconds=10.0)
    assert list(folder.glob(".osora-*")) == []
    return caught.value


def alive(folder):
    """Yield the processes of a run in `folder`, without its launcher."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in process.cmdline():  # empty where a process has ended and is not reaped
                yield process


def left(folder):
    return list(alive(folder))


def wait_for(condition, seconds=40.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def drive(folder, *arguments):
    def launched():
        with errors.interruptible():
            run(folder, *arguments)

    return errors.run(launched)


@pytest.fixture
def driver(processes):
    """Start a launcher in a process of its own, as a command line calls it."""
    return lambda folder, *arguments: processes.program(folder, drive, folder, *arguments)


def log(folder, rank):
    return (folder / "logs" / f"rank{rank}.log").read_text()


class TestDone:
    def test_rank_0_prints_and_the_others_write_to_their_logs(self, tmp_path, capfd):
        run(tmp_path, gpus=3)
        assert capfd.readouterr() == ("result of rank 0 of 3 on 1\n", "")
        assert [log(tmp_path, rank) for rank in (1, 2)] == [f"result of rank {rank} of 3 on 1\n" for rank in (1, 2)]
        assert left(tmp_path) == []

    @pytest.mark.parametrize("named", [True, False])
    def test_the_launchers_number_of_threads_is_not_the_users(self, tmp_path, capfd, monkeypatch, named):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        if named:
            monkeypatch.setenv("OMP_NUM_THREADS", "3")
        code = f"import os; print(*(os.environ.get(name) for name in {(*VARIABLES, RANK_VARIABLE)}))"
        launch(request(tmp_path, gpus=1), [], command=(sys.executable, "-c", code))
        threads, mkl, marker = capfd.readouterr().out.split()
        assert mkl == "None"
        assert (threads, marker) == ("3", "None") if named else threads == marker and int(marker) > 0

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the ports of other processes are not shown")
    def test_only_this_machine_reaches_the_ranks_and_only_this_account_their_store(self, tmp_path, processes):
        # A launcher of its own: the process of the tests may listen for other reasons.
        launcher = processes.program(
            tmp_path, run, tmp_path, "--gloo", "--rank", "1", "--stage", "decode", "--act", "ports"
        )
        assert launcher.end(60.0)[0] == 0
        # Torch 2.10 reports that gloo has connected.
        assert [line for line in log(tmp_path, 1).splitlines() if "[Gloo]" not in line] == [
            "[]",
            "['127.0.0.1']",
            "700 True True",
            "result of rank 1 of 2 on 1",
        ]


HOST = socket.gethostname()
REFUSED = "weights.safetensors is truncated"
# What a rank does, the message, the exit code, what the hint says, and what the rank's log shows.
ENDS = {
    "killed at the start": ("--rank 1 --stage start --act kill", "killed (SIGKILL)", 4, "", ""),
    "killed": ("--rank 0 --act kill", "killed (SIGKILL)", 4, "left by rank 0", ""),
    "crashed": ("--rank 0 --act crash", "crashed (SIGSEGV)", 1, "", "launch_rank.py"),
    "a bug": ("--rank 1 --act raise", "ValueError: the sky is green", 1, "", "Traceback"),
    "an exit": ("--rank 1 --act exit", "ended with exit code 7: no luck", 7, "", "no luck"),
    "stopped": ("--rank 1 --act stop", "stopped (SIGSTOP), no sign of life for 1 s", 4, "", ""),
    "an error": ("--rank 0 --act refuse", None, 3, f"download it again\nreported by rank 0 on {HOST}", ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_ends_ends_the_run_with_one_message(tmp_path, capfd, end):
    words, cause, code, hint, logged = ENDS[end]
    rank, stage = int("rank 1" in words), "start" if "start" in words else "denoise"
    failure = failing(tmp_path, *words.split(), pace={**PACE, "STOPPED_S": 1.0, "SETTLE_S": 0.5})
    message = f"rank {rank} on {HOST}, in the stage {stage}: {cause}" if cause else REFUSED
    assert (failure.message, failure.exit_code) == (message, code)
    assert hint in failure.hint
    assert f"log: {tmp_path}/logs/rank{rank}.log" in failure.hint
    assert logged in log(tmp_path, rank)
    assert "Traceback" not in log(tmp_path, 1 - rank)
    assert capfd.readouterr().err == ""


def test_an_error_of_all_ranks_is_reported_once(tmp_path, capfd):
    failure = failing(tmp_path, "--act", "refuse", gpus=3)
    assert (failure.message, failure.hint, failure.exit_code) == (REFUSED, "download it again", 3)
    assert capfd.readouterr() == ("", "")


def test_ranks_that_ignore_signals_and_what_they_started_are_killed(tmp_path):
    thread = threading.Timer(0.0, kill_when, args=(tmp_path, 1, "denoise"))
    thread.start()
    failure = failing(tmp_path, "--act", "ignore", pace={**PACE, "INTERRUPT_S": 0.5})
    thread.join()
    assert "rank 1" in failure.message


def kill_when(folder, rank, stage):
    """Kill a rank as soon as it is in a stage, and all have started something."""
    wait_for(lambda: (folder / f"{stage}{rank}").exists() and len(left(folder)) >= 4)
    ranks = [each for each in alive(folder) if any("launch_rank" in word for word in each.cmdline())]
    next(each for each in ranks if each.environ()["RANK"] == str(rank)).kill()


@pytest.mark.slow
@pytest.mark.parametrize("act", ["stop", "hang"])
def test_a_rank_is_stopped_or_hangs_while_the_others_wait_in_a_collective_with_the_usual_pace(tmp_path, act):
    """Beside more busy processes than there are cores."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(20)]
    try:
        failure = failing(tmp_path, "--gloo", "--rank", "0", "--act", act, pace={})
    finally:
        for other in others:
            other.kill()
            other.wait()
    stopped_at = (tmp_path / "denoise0").stat().st_mtime
    assert time.time() - stopped_at < PROMISED_S
    assert "rank 0" in failure.message


@pytest.mark.slow
def test_waiting_on_a_peer_that_works_is_no_failure(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("opensora_cli.engine.launch.process.SILENCE_S", 1.0)
    run(tmp_path, "--gloo", "--rank", "1", "--stage", "load", "--act", "compute")
    assert capfd.readouterr().out == "result of rank 0 of 2 on 1\n"


class TestInterrupted:
    @pytest.mark.parametrize(
        ("act", "lines"),
        [
            ("wait", ["error: interrupted", "       kept by rank 0", ""]),
            ("fail to save", ["error: interrupted", "       the disk is full", "       make room there", ""]),
        ],
    )
    def test_ctrl_c(self, tmp_path, driver, act, lines):
        launcher = driver(tmp_path, "--act", act)
        wait_for(lambda: all((tmp_path / f"denoise{rank}").exists() for rank in range(2)))
        launcher.send(signal.SIGINT)
        code, out, err = launcher.end(PROMISED_S)
        assert (code, out, err.split("\n")) == (130, "", lines)
        assert left(tmp_path) == []

    def test_while_a_rank_is_started(self, tmp_path, monkeypatch):
        """The rank that was being started does not stay."""
        real = subprocess.Popen

        def interrupted(*arguments, **named):
            started = real(*arguments, **named)
            signal.raise_signal(signal.SIGINT)
            return started

        monkeypatch.setattr("opensora_cli.engine.launch.process.subprocess.Popen", interrupted)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path, "--act", "wait")
            assert left(tmp_path) == []
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGINT, before)

    def test_launcher_killed(self, tmp_path, driver):
        """Also a rank that is stopped does not stay."""
        launcher = driver(tmp_path, "--rank", "1", "--act", "stop")
        wait_for(lambda: (tmp_path / "denoise1").exists())
        launcher.send(signal.SIGKILL)
        launcher.end(PROMISED_S)
        if sys.platform == "linux":
            wait_for(lambda: left(tmp_path) == [], PROMISED_S)

    @pytest.mark.slow
    def test_twice_kills_at_once(self, tmp_path, driver):
        launcher = driver(tmp_path, "--act", "ignore")
        wait_for(lambda: len(left(tmp_path)) == 4)
        launcher.send(signal.SIGINT)
        time.sleep(0.5)
        launcher.send(signal.SIGINT)
        assert launcher.end(PROMISED_S)[0] == 130
        assert left(tmp_path) == []
