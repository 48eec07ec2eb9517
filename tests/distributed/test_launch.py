"""Ranks that die, freeze, fail and are interrupted: the run ends in time, with one message, and leaves nothing.

Most ranks here need no torch (`launch_rank.py`), so that many ends can be tried in little time.
"""

import dataclasses
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from opensora_cli.core.exceptions import HardwareError, OutputError, RequestError
from opensora_cli.engine.launch.failures import RankFailure
from opensora_cli.engine.launch.launcher import Pace, launch
from opensora_cli.engine.launch.request import LaunchRequest

HERE = Path(__file__).parent
COMMAND = (sys.executable, str(HERE / "launch_rank.py"))
PACE = Pace(look_s=0.05, frozen_s=5.0, settle_s=1.0, interrupt_s=2.0, terminate_s=0.5, meet_s=30.0)
PROMISED_S = 20.0

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks are started on Linux and macOS only")


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent.parent))


def request(folder, **changes):
    fields = {"gpus": 2, "device_type": "cpu", "log_dir": folder / "logs"}
    return LaunchRequest(**{**fields, **changes})


def run(folder, *arguments, pace=PACE, **changes):
    launch(request(folder, **changes), [str(folder), *arguments], command=COMMAND, pace=pace)


def failing(folder, *arguments, **changes):
    """Return the failure of a run, after the checks that hold for all."""
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run(folder, *arguments, **changes)
    assert time.monotonic() - start < PROMISED_S + 10.0  # the start of the ranks counts here too
    assert left(folder) == []
    return caught.value


def left(folder):
    """Return what is alive of a run in `folder`, but for its launcher."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()  # empty where a process has ended and is not reaped
            if str(folder) in line and not any("launch_driver" in word for word in line):
                found.append(line)
        except psutil.Error:
            continue
    return found


def wait_for(condition, seconds=40.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def driver(folder, *arguments, **fields):
    """Start a launcher in a process of its own."""
    fields = {"gpus": 2, "log_dir": str(folder / "logs"), **fields}
    return subprocess.Popen(
        [sys.executable, str(HERE / "launch_driver.py"), json.dumps(fields), str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_endpoint():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def log(folder, rank):
    return (folder / "logs" / f"rank{rank}.log").read_text()


class TestDone:
    def test_rank_0_alone_prints(self, tmp_path, capfd):
        run(tmp_path, gpus=3)
        assert capfd.readouterr() == ("result of rank 0 of 3 on 1\n", "")
        assert [log(tmp_path, rank) for rank in range(3)] == [f"result of rank {rank} of 3 on 1\n" for rank in range(3)]
        assert left(tmp_path) == []

    def test_over_gloo(self, tmp_path, capfd):
        run(tmp_path, "--gloo")
        assert capfd.readouterr().out == "result of rank 0 of 2 on 1\n"

    def test_busy_ranks_are_not_frozen(self, tmp_path):
        """One that says nothing for longer than the limit, but computes."""
        busy = "import time; start = time.monotonic()\nwhile time.monotonic() < start + 2.5: pass\nprint('done')"
        launch(request(tmp_path), [], command=(sys.executable, "-c", busy), pace=Pace(frozen_s=1.5))
        assert log(tmp_path, 1) == "done\n"


class TestKilled:
    @pytest.mark.parametrize("stage", ["start", "load", "denoise", "decode"])
    def test_in_each_stage(self, tmp_path, capfd, stage):
        failure = failing(tmp_path, "--rank", "1", "--stage", stage, "--act", "kill")
        assert failure.message == f"rank 1 on {socket.gethostname()}, in the stage {stage}: killed (SIGKILL)"
        assert failure.exit_code == 4
        assert f"log: {tmp_path}/logs/rank1.log" in failure.hint
        assert capfd.readouterr().err == ""

    def test_while_the_others_wait_in_a_collective(self, tmp_path, capfd):
        failure = failing(tmp_path, "--gloo", "--rank", "1", "--act", "kill")
        assert "rank 1" in failure.message
        assert "SIGKILL" in failure.message
        assert capfd.readouterr() == ("", "")

    def test_rank_0(self, tmp_path):
        failure = failing(tmp_path, "--rank", "0", "--act", "kill")
        assert failure.message.startswith("rank 0 ")
        assert "kept by rank 1" in failure.hint

    def test_crashed(self, tmp_path, capfd):
        failure = failing(tmp_path, "--rank", "0", "--act", "crash")
        assert failure.message.endswith("in the stage denoise: crashed (SIGSEGV)")
        assert failure.exit_code == 1
        assert "launch_rank.py" in log(tmp_path, 0)  # where it crashed
        assert capfd.readouterr() == ("", "")

    def test_out_of_memory(self, tmp_path, monkeypatch):
        counts = iter([3, 4])
        monkeypatch.setattr("opensora_cli.engine.launch.failures.count_memory_kills", lambda: next(counts, 4))
        failure = failing(tmp_path, "--rank", "1", "--act", "kill")
        assert failure.message.endswith("out of memory: the system killed it (SIGKILL)")

    def test_deaf_ranks_and_what_they_started_are_killed(self, tmp_path):
        """Ranks that ignore all requests to end."""
        thread = threading.Timer(0.0, kill_when, args=(tmp_path, 1, "denoise"))
        thread.start()
        failure = failing(tmp_path, "--act", "ignore", pace=dataclasses.replace(PACE, interrupt_s=0.5))
        thread.join()
        assert "rank 1" in failure.message


def kill_when(folder, rank, stage):
    """Kill a rank as soon as it is in a stage, and all have started something."""
    wait_for(lambda: (folder / f"{stage}{rank}").exists() and len(left(folder)) >= 4)
    victim = next(
        process for process in psutil.process_iter() if str(folder) in cmdline(process) and rank_of(process) == rank
    )
    victim.kill()


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def rank_of(process):
    is_rank = any("launch_rank" in word for word in cmdline(process))
    return int(process.environ()["RANK"]) if is_rank else None


class TestFailing:
    def test_a_bug_keeps_its_traceback_in_the_log(self, tmp_path, capfd):
        failure = failing(tmp_path, "--rank", "1", "--act", "raise")
        assert failure.message == (
            f"rank 1 on {socket.gethostname()}, in the stage denoise: ValueError: the sky is green"
        )
        assert failure.exit_code == 1
        assert "Traceback" in log(tmp_path, 1)
        assert "Traceback" not in log(tmp_path, 0)
        assert capfd.readouterr() == ("", "")

    def test_a_bug_of_rank_0_is_in_its_log_alone(self, tmp_path, capfd):
        failing(tmp_path, "--rank", "0", "--act", "raise")
        assert "Traceback" in log(tmp_path, 0)
        assert capfd.readouterr() == ("", "")

    def test_error_of_all_is_told_once(self, tmp_path, capfd):
        failure = failing(tmp_path, "--act", "refuse", gpus=3)
        assert failure.message == "weights.safetensors is cut short"
        assert failure.hint == "download it again"
        assert failure.exit_code == 3
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("rank", [0, 1])
    def test_error_of_one_says_which(self, tmp_path, rank):
        failure = failing(tmp_path, "--rank", str(rank), "--act", "refuse")
        assert failure.message == "weights.safetensors is cut short"
        assert failure.hint.startswith(
            f"download it again\nso says rank {rank} on {socket.gethostname()}, in the stage denoise\n"
            f"log: {tmp_path}/logs/rank{rank}.log"
        )
        assert failure.exit_code == 3

    def test_error_while_the_others_wait_in_a_collective(self, tmp_path, capfd):
        failure = failing(tmp_path, "--gloo", "--rank", "1", "--act", "refuse")
        assert failure.message == "weights.safetensors is cut short"
        assert capfd.readouterr() == ("", "")

    def test_exit_without_a_word(self, tmp_path):
        failure = failing(tmp_path, "--rank", "1", "--act", "exit")
        assert failure.message.endswith("ended with exit code 7: no luck")
        assert failure.exit_code == 7

    def test_no_such_command(self, tmp_path):
        missing = tmp_path / "missing"
        with pytest.raises(OutputError, match="cannot start rank 0"):
            launch(request(tmp_path), [], command=(str(missing),), pace=PACE)


class TestFrozen:
    @pytest.mark.parametrize(
        "stage", ["denoise", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("start", "load", "decode"))]
    )
    def test_stopped(self, tmp_path, stage):
        pace = dataclasses.replace(PACE, frozen_s=3.0)
        failure = failing(tmp_path, "--rank", "1", "--stage", stage, "--act", "stop", pace=pace)
        assert f"rank 1 on {socket.gethostname()}, in the stage {stage}: stopped (SIGSTOP)" in failure.message
        assert failure.exit_code == 4

    @pytest.mark.slow
    def test_while_the_others_wait_in_a_collective_with_the_usual_pace(self, tmp_path):
        start = time.monotonic()
        failure = failing(tmp_path, "--gloo", "--rank", "0", "--act", "stop", pace=None)
        stopped_at = (tmp_path / "denoise0").stat().st_mtime
        assert time.time() - stopped_at < PROMISED_S
        assert time.monotonic() > start
        assert "rank 0" in failure.message


class TestSilent:
    """Ranks that live, but do not get on: the one that the others wait for is named, and its log says where it is."""

    @pytest.mark.parametrize(
        ("rank", "stage", "act"),
        [
            (1, "load", "wait"),
            pytest.param(0, "denoise", "wait", marks=pytest.mark.slow),
            pytest.param(1, "denoise", "silence", marks=pytest.mark.slow),
            (1, "denoise", "spin"),
        ],
    )
    def test_one_of_them(self, tmp_path, rank, stage, act):
        failure = failing(tmp_path, "--gloo", "--rank", str(rank), "--stage", stage, "--act", act, "--silence", "1.5")
        where = f"rank {rank} on {socket.gethostname()}, in the stage {stage}"
        assert failure.message.startswith(f"{where}: no progress for ")
        assert failure.exit_code == 4
        assert f"log: {tmp_path}/logs/rank{rank}.log" in failure.hint
        assert "launch_rank.py" in log(tmp_path, rank)

    @pytest.mark.slow
    def test_waiting_for_one_that_works(self, tmp_path, capfd):
        run(tmp_path, "--gloo", "--rank", "1", "--stage", "load", "--act", "compute", "--silence", "1")
        assert capfd.readouterr().out == "result of rank 0 of 2 on 1\n"

    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [1, 2])
    def test_on_one_of_two_machines(self, tmp_path, rank):
        endpoint = free_endpoint()
        arguments = ("--gloo", "--rank", str(rank), "--stage", "load", "--act", "wait", "--silence", "1.5")
        fields = {"nnodes": 2, "rdzv_endpoint": endpoint}
        launchers = [driver(tmp_path, *arguments, node_rank=node, **fields) for node in range(2)]
        for launcher in launchers:
            out, err = launcher.communicate(timeout=60.0)
            assert out == ""
            assert err.startswith(f"error: rank {rank} on {socket.gethostname()}, in the stage load: no progress for")
            assert launcher.returncode == 4
        assert left(tmp_path) == []

    @pytest.mark.slow
    def test_a_machine_that_waits_for_another_that_works(self, tmp_path):
        endpoint = free_endpoint()
        arguments = ("--gloo", "--rank", "2", "--stage", "load", "--act", "compute", "--silence", "1")
        fields = {"nnodes": 2, "rdzv_endpoint": endpoint}
        launchers = [driver(tmp_path, *arguments, node_rank=node, **fields) for node in range(2)]
        assert [launcher.communicate(timeout=60.0) for launcher in launchers] == [
            ("result of rank 0 of 4 on 2\n", ""),
            ("", ""),
        ]


class TestInterrupted:
    def test_ctrl_c(self, tmp_path):
        launcher = driver(tmp_path, "--act", "wait")
        wait_for(lambda: all((tmp_path / f"denoise{rank}").exists() for rank in range(2)))
        launcher.send_signal(signal.SIGINT)
        out, err = launcher.communicate(timeout=PROMISED_S)
        assert launcher.returncode == 130
        assert out == ""
        assert err.split("\n") == ["error: interrupted", "       kept by rank 0", ""]
        assert left(tmp_path) == []

    def test_what_could_not_be_saved_then_is_told(self, tmp_path):
        launcher = driver(tmp_path, "--act", "fail to save")
        wait_for(lambda: all((tmp_path / f"denoise{rank}").exists() for rank in range(2)))
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=PROMISED_S)
        assert launcher.returncode == 130
        assert err.split("\n") == ["error: interrupted", "       the disk is full", "       make room there", ""]

    def test_while_a_rank_is_started(self, tmp_path, monkeypatch):
        """Not even a rank that nobody has heard of stays."""
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

    def test_launcher_killed(self, tmp_path):
        """Also a rank that is stopped does not stay."""
        launcher = driver(tmp_path, "--rank", "1", "--act", "stop")
        wait_for(lambda: (tmp_path / "denoise1").exists())
        launcher.kill()
        launcher.communicate(timeout=PROMISED_S)
        if sys.platform == "linux":
            wait_for(lambda: left(tmp_path) == [], PROMISED_S)

    @pytest.mark.slow
    @pytest.mark.parametrize("stage", ["start", "load", "denoise", "decode"])
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_in_each_stage(self, tmp_path, stage, number):
        launcher = driver(tmp_path, "--gloo", "--stage", stage, "--act", "wait")
        waiting = (lambda: len(left(tmp_path)) == 2) if stage == "start" else (tmp_path / f"{stage}1").exists
        wait_for(waiting)
        launcher.send_signal(number)
        out, err = launcher.communicate(timeout=PROMISED_S)
        assert launcher.returncode == 130
        assert (out, err.split("\n")[0]) == ("", "error: interrupted")
        assert "Traceback" not in err
        assert left(tmp_path) == []

    @pytest.mark.slow
    def test_twice_kills_at_once(self, tmp_path):
        launcher = driver(tmp_path, "--act", "ignore")
        wait_for(lambda: len(left(tmp_path)) == 4)
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.5)
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=PROMISED_S)
        assert launcher.returncode == 130
        assert left(tmp_path) == []


class TestTwoMachines:
    def test_gloo(self, tmp_path):
        endpoint = free_endpoint()
        second = driver(tmp_path, "--gloo", gpus=2, nnodes=2, node_rank=1, rdzv_endpoint=endpoint)
        first = driver(tmp_path, "--gloo", gpus=2, nnodes=2, rdzv_endpoint=endpoint)
        assert first.communicate(timeout=60.0) == ("result of rank 0 of 4 on 2\n", "")
        assert second.communicate(timeout=60.0) == ("", "")
        assert (first.returncode, second.returncode) == (0, 0)
        assert log(tmp_path, 3) == "result of rank 3 of 4 on 2\n"

    @pytest.mark.slow
    @pytest.mark.parametrize("victim", [0, 2])
    def test_a_rank_killed(self, tmp_path, victim):
        endpoint = free_endpoint()
        fields = {"nnodes": 2, "rdzv_endpoint": endpoint}
        arguments = ("--rank", str(victim), "--act", "kill", "--gloo")
        launchers = [driver(tmp_path, *arguments, node_rank=node, **fields) for node in range(2)]
        for launcher in launchers:
            out, err = launcher.communicate(timeout=60.0)
            assert out == ""
            assert err.startswith(f"error: rank {victim} on {socket.gethostname()}, in the stage denoise: killed")
            assert launcher.returncode == 4
        assert left(tmp_path) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("victim", [0, 1])
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    def test_a_launcher_lost(self, tmp_path, victim, number):
        endpoint = free_endpoint()
        fields = {"nnodes": 2, "rdzv_endpoint": endpoint}
        launchers = [driver(tmp_path, "--act", "wait", node_rank=node, **fields) for node in range(2)]
        wait_for(lambda: all((tmp_path / f"denoise{rank}").exists() for rank in range(4)))
        launchers[victim].send_signal(number)
        survivor = launchers[1 - victim]
        _, err = survivor.communicate(timeout=PROMISED_S)
        assert survivor.returncode == 4
        assert f"machine {victim}" in err
        launchers[victim].kill()
        launchers[victim].communicate(timeout=PROMISED_S)
        wait_for(lambda: left(tmp_path) == [], PROMISED_S)

    @pytest.mark.slow
    def test_interrupted_at_one(self, tmp_path):
        endpoint = free_endpoint()
        fields = {"nnodes": 2, "rdzv_endpoint": endpoint}
        launchers = [driver(tmp_path, "--act", "wait", node_rank=node, **fields) for node in range(2)]
        wait_for(lambda: all((tmp_path / f"denoise{rank}").exists() for rank in range(4)))
        launchers[1].send_signal(signal.SIGINT)
        messages = [launcher.communicate(timeout=PROMISED_S)[1].split("\n")[0] for launcher in launchers]
        assert messages == ["error: interrupted at machine 1", "error: interrupted"]
        assert [launcher.returncode for launcher in launchers] == [130, 130]
        assert left(tmp_path) == []


class TestMeeting:
    def test_nobody_listens(self, tmp_path):
        endpoint = free_endpoint()
        with pytest.raises(HardwareError, match=f"nobody listens at rdzv_endpoint={endpoint}"):
            run(tmp_path, nnodes=2, node_rank=1, rdzv_endpoint=endpoint, pace=Pace(meet_s=0.5))
        assert left(tmp_path) == []

    def test_something_else_listens(self, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as other:
            endpoint = f"127.0.0.1:{other.getsockname()[1]}"
            with pytest.raises(HardwareError, match=f"cannot meet at {endpoint}"):
                run(tmp_path, nnodes=2, node_rank=1, rdzv_endpoint=endpoint, pace=Pace(meet_s=1.0))
            with pytest.raises(HardwareError, match="cannot listen at port"):
                run(tmp_path, nnodes=2, rdzv_endpoint=endpoint, pace=Pace(meet_s=1.0))

    def test_unknown_host(self, tmp_path):
        with pytest.raises(RequestError, match="nowhere"):
            run(tmp_path, nnodes=2, node_rank=1, rdzv_endpoint="nowhere.invalid:29500", pace=PACE)

    def test_the_second_machine_does_not_come(self, tmp_path):
        with pytest.raises(HardwareError, match="machine 1 of 2 did not come"):
            run(tmp_path, nnodes=2, rdzv_endpoint=free_endpoint(), pace=Pace(meet_s=0.5))

    def test_machines_that_were_asked_for_different_things(self, tmp_path):
        endpoint = free_endpoint()
        pace = Pace(meet_s=1.5)
        errors = {}

        def start(name, **fields):
            try:
                run(tmp_path / name, rdzv_endpoint=endpoint, pace=pace, **fields)
            except (RequestError, HardwareError) as error:
                errors[name] = error.message

        threads = [
            threading.Thread(target=start, args=(name,), kwargs=fields)
            for name, fields in {
                "first": {"nnodes": 3},
                "second": {"nnodes": 3, "node_rank": 1},
                "same": {"nnodes": 3, "node_rank": 1},
            }.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors["first"] == f"machine 2 of 3 did not come to {endpoint}"
        assert "node_rank=1 was taken by another machine" in {errors["second"], errors["same"]}

    def test_different_numbers_of_ranks(self, tmp_path):
        endpoint = free_endpoint()
        fields = {"nnodes": 2, "rdzv_endpoint": endpoint}
        launchers = [driver(tmp_path, gpus=1 + node, node_rank=node, **fields) for node in range(2)]
        messages = [launcher.communicate(timeout=60.0)[1].split("\n")[0] for launcher in launchers]
        host = socket.gethostname()
        assert messages == [f"error: gpus=1 here, and 2 on {host}", f"error: gpus=2 here, and 1 on {host}"]
        assert [launcher.returncode for launcher in launchers] == [2, 2]
        assert left(tmp_path) == []

    @pytest.mark.slow
    def test_different_numbers_of_machines(self, tmp_path):
        endpoint = free_endpoint()
        other = driver(tmp_path, nnodes=3, rdzv_endpoint=endpoint)
        with pytest.raises(RequestError, match="nnodes=2 here, and 3 on"):
            run(tmp_path, nnodes=2, node_rank=1, rdzv_endpoint=endpoint)
        other.kill()
        other.communicate()
