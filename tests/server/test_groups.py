"""Groups of ranks that make each video of a server together."""

import errno
import json
import os
import signal
import tempfile
import time
from contextlib import suppress

import psutil
import pytest
from served import Served, is_running

from opensora_cli.cli.app import main
from opensora_cli.server.worker import Commands, _make_videos, _relayed
from opensora_cli.settings.load import usual_settings

SETTINGS = {"num_frames": 5, "steps": 12}
LONG = {"num_frames": 5, "steps": 300}


@pytest.fixture
def served(tmp_path):
    with Served(tmp_path / "serve", "--gpus", "2", "--set", "runtime.device=cpu") as served:
        yield served


def ranks_of(served):
    found = {}
    for process in psutil.Process(served.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            environment = process.environ()
            if "OSORA_RANK_CHANNEL" in environment and "serve" in process.cmdline():
                found[environment["RANK"]] = process
    return [found[rank] for rank in sorted(found)]


def test_commands_are_relayed_until_the_video_is_cancelled(tmp_path):
    theirs, ours = os.pipe()
    pipe, relayed, job_ids = tmp_path / "commands", [], ["first"]

    def talk():
        with (
            os.fdopen(theirs) as stream,
            os.fdopen(ours, "w", buffering=1) as server,
            _relayed(Commands(stream), {"do": "make", "id": "first"}, pipe, job_ids=job_ids),
            pipe.open() as to_rank,
        ):
            relayed.append(json.loads(to_rank.readline()))
            server.write('{"do": "cancel", "id": "other"}\n{"do": "make", "id": "second"}\n')
            relayed.append(json.loads(to_rank.readline()))
            assert job_ids == ["first", "second"]
            server.write('{"do": "cancel", "id": "second"}\n')
            for _ in range(600):
                time.sleep(0.1)  # as the launcher waits

    with pytest.raises(KeyboardInterrupt):
        talk()
    assert relayed == [{"do": "make", "id": "first"}, {"do": "make", "id": "second"}]


@pytest.mark.parametrize("missing", ["temporary folder", "commands"])
def test_a_video_whose_ranks_cannot_be_started_fails_with_its_reason(missing, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "commands")

    if missing == "commands":
        monkeypatch.setattr(os, "mkfifo", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path if missing == "commands" else tmp_path / "missing"))
    settings = usual_settings("demo").replace({"parallel.gpus": 2, "runtime.device": "cpu"}).model_dump(mode="json")
    theirs, ours = os.pipe()
    reports, commands = [], Commands(os.fdopen(theirs))
    for command in ({"id": "a", "settings": settings}, None):
        commands.waiting.put(command)
    _make_videos(commands, lambda **report: reports.append(report), None)
    os.close(ours)
    ((event, job_id, error),) = [tuple(report.values()) for report in reports]
    assert (event, job_id) == ("failed", "a")
    assert missing in error["message"]
    assert not list(tmp_path.iterdir())


def test_ranks_that_no_server_started_are_refused(tmp_path, monkeypatch, capsys):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "--folder", str(tmp_path)]) == 2
    assert "a server starts its own ranks" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_keep_their_models_until_a_video_is_cancelled_or_fails(served):
    whole = served.make(settings=SETTINGS)
    assert served.finished(whole)["status"] == "completed"
    first = ranks_of(served)
    assert len(first) == 2
    plan = served.call("POST", "/v1/plan", {"prompt": "sea", "settings": SETTINGS})
    assert any(line.startswith("devices   2") for line in plan["lines"]), plan
    again = served.make(settings=SETTINGS)
    assert served.finished(again)["status"] == "completed"
    assert ranks_of(served) == first
    assert served.result(again) == served.result(whole)
    running, next_one = served.make(settings=LONG), served.make(settings=SETTINGS)
    served.until(running, is_running)
    broken = served.make_broken()
    served.call("POST", f"/v1/videos/{running}/cancel")
    assert served.finished(running)["status"] == "cancelled"
    assert served.finished(next_one)["status"] == "completed"
    assert served.result(next_one) == served.result(whole)
    second = ranks_of(served)
    assert len(second) == 2
    assert not set(first) & set(second)
    video = served.finished(broken)
    assert video["status"] == "failed"
    assert "reference 1" in video["error"]["message"]
    assert served.finished(served.make(settings=SETTINGS))["status"] == "completed"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_video_of_ranks_is_the_same_after_any_process_was_killed(served):
    whole = served.make(settings=SETTINGS)
    assert served.finished(whole)["status"] == "completed"
    for killed in ("rank 0", "rank 1", "worker", "server", "term"):
        video_id = served.make(settings=SETTINGS)
        served.until(video_id, is_running)
        ranks = ranks_of(served)
        if killed.startswith("rank"):
            ranks[int(killed[-1])].kill()
        elif killed == "worker":
            ranks[0].parent().kill()
        else:
            served.process.send_signal(signal.SIGTERM if killed == "term" else signal.SIGKILL)
            served.process.wait(60)
            limit = time.monotonic() + 10
            while any(process.is_running() for process in ranks):
                assert time.monotonic() < limit, killed
                time.sleep(0.1)
            served.start()
        assert served.finished(video_id)["status"] == "completed", killed
        assert served.result(video_id) == served.result(whole), killed
