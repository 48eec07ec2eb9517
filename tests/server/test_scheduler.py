"""The scheduler and the events of a server, without its processes."""

import asyncio
import errno
import json
import sqlite3
from dataclasses import replace

import pytest

from opensora_cli.server import scheduler as scheduling
from opensora_cli.server.app import Server, make_app
from opensora_cli.server.jobs import JobStore, Status
from opensora_cli.server.scheduler import Scheduler
from opensora_cli.settings.load import usual_settings

REQUEST = {"prompt": "sea", "model": "demo", "seconds": "1", "size": "256px", "settings": {}, "seed": 1}
REQUEST |= {"num_frames": 5, "fps": 24, "num_references": 0}
JOB = {"request": REQUEST, "settings": {}}


@pytest.fixture
def server(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite", max_queue=5)
    store.add("video_1", JOB)
    scheduler = Scheduler(store, tmp_path, groups=0, save_every=30)
    yield Server(store=store, scheduler=scheduler, folder=tmp_path, usual=usual_settings("demo"), base={})
    store.close()


def test_a_cancelled_video_stays_cancelled_when_the_server_is_killed_before_it_ends(server):
    server.store.take()
    asyncio.run(server.scheduler.cancel("video_1"))
    assert server.store.get("video_1").status is Status.IN_PROGRESS
    asyncio.run(Scheduler(server.store, server.folder, groups=0, save_every=30).run())
    assert server.store.get("video_1").status is Status.CANCELLED


def test_videos_that_a_killed_server_made_are_first_and_keep_their_order(server):
    for number in (2, 3):
        server.store.add(f"video_{number}", JOB)
    for _ in range(2):
        server.store.take()
    asyncio.run(server.scheduler.run())
    assert server.store.ids(Status.QUEUED) == ["video_1", "video_2", "video_3"]


def test_the_events_of_a_deleted_video_end(server):
    async def run():
        events = server.events("video_1")
        found = [await anext(events)]
        await server.scheduler.delete("video_1")
        return found + [event async for event in events]

    found = asyncio.run(asyncio.wait_for(run(), 10))
    assert [json.loads(text.splitlines()[1][6:])["event"] for text in found] == ["state", "deleted"]


def test_a_listener_that_does_not_read_is_dropped(server):
    async def run():
        events = server.scheduler.events(server.scheduler.event_count)
        server.scheduler.publish({"number": 0})
        found = [await anext(events)]
        for number in range(1, scheduling._MOST_EVENTS + 1):
            server.scheduler.publish({"number": number})
        found.append(await anext(events))
        for number in range(scheduling._MOST_EVENTS):
            server.scheduler.publish({"number": -number})
        return [event["number"] for event in found], [event async for event in events]

    assert asyncio.run(run()) == ([0, 1], [])


def test_two_clients_delete_a_running_video(server):
    async def run():
        server.store.take()
        deleting = asyncio.gather(*(server.scheduler.delete("video_1") for _ in range(2)))
        await asyncio.sleep(0.01)
        server.store.finish("video_1", Status.CANCELLED)
        await deleting

    asyncio.run(asyncio.wait_for(run(), 10))


def test_the_video_is_found_beside_its_last_frame(server):
    server.store.take()
    folder = server.scheduler.job_folder("video_1")
    folder.mkdir(parents=True)
    for name in ("video.last.png", "video.mp4", "video.mp4.json", "video.preview.gif"):
        (folder / name).touch()
    assert server.result(server.store.finish("video_1", Status.COMPLETED)).name == "video.mp4"


def test_what_a_killed_server_left_is_swept_and_other_files_stay(server):
    jobs = server.folder / "jobs"
    one, two, three, four = (f"video_{number:024x}" for number in range(4))
    kept = [f"{one}/reference_0_0123abcd.png", f"{two}/video.mp4", f"{three}/notes.txt", "video_holiday/a.png"]
    kept += ["other/reference_0_0123abcd.png", f"{one}.copy/reference_0_0123abcd.png", f"{'video_' + 'f' * 24}"]
    swept = [f"{four}/reference_0_0123abcd.png", f"{'video_' + 'e' * 24}.deleted/video.mp4"]
    outside = server.folder / "outside"
    for path in [*(jobs / name for name in (*kept, *swept)), outside / "reference_0_0123abcd.png"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (jobs / f"video_{'d' * 24}").symlink_to(outside)
    for job_id in (one, "video_" + "e" * 24):  # the second was deleted, but the record stayed
        server.store.add(job_id, JOB)
    asyncio.run(server.scheduler.run())
    assert server.store.ids(Status.QUEUED) == ["video_1", one]
    assert all((jobs / name).exists() for name in kept)
    assert (outside / "reference_0_0123abcd.png").exists()
    assert not any((jobs / name).parent.exists() for name in swept)


class Worker:
    """Stand-in for a process that makes videos, and reports nothing."""

    has_ended = False

    @classmethod
    async def start(cls, *words):
        return cls()

    async def send(self, **command):
        raise KeyError("/srv/secret")

    async def reports(self):
        await asyncio.sleep(60)
        yield {}


def test_a_bug_of_the_scheduler_is_logged_and_answered_by_healthz(server, monkeypatch, caplog):
    monkeypatch.setattr(scheduling, "Process", Worker)
    scheduler = Scheduler(server.store, server.folder, groups=2, save_every=30)
    served = replace(server, scheduler=scheduler)
    status, _ = asyncio.run(answer_of(make_app(served), "/healthz"))
    assert status == 200
    asyncio.run(asyncio.wait_for(scheduler.run(), 10))
    assert "/srv/secret" in caplog.text  # with its traceback
    status, body = asyncio.run(answer_of(make_app(served), "/healthz"))
    assert (status, body["error"]["type"]) == (503, "server_error")
    assert body["error"]["message"] == "no more videos are made: KeyError"


def test_a_bug_in_a_route_is_answered_in_the_shape_of_errors_and_raised_for_the_log(server, monkeypatch):
    monkeypatch.setattr(JobStore, "page", lambda *_, **__: [][0])
    answers = []
    with pytest.raises(IndexError):
        asyncio.run(answer_of(make_app(server), "/v1/videos", answers))
    status, body = answers
    assert status == 500
    assert body["error"].keys() == {"code", "message", "param", "type"}
    assert (body["error"]["code"], body["error"]["type"]) == ("internal_error", "server_error")


def full_database():
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/srv/secret"), 507, "disk_full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/srv/secret"), 507, "disk_full"),
        (PermissionError(errno.EACCES, "Permission denied", "/srv/secret"), 500, "file_error"),
        (TimeoutError(), 500, "file_error"),
        (full_database(), 507, "disk_full"),
    ],
)
def test_only_a_full_disk_is_answered_as_one(server, monkeypatch, caplog, error, status, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(JobStore, "page", fail)
    found, body = asyncio.run(answer_of(make_app(server), "/v1/videos"))
    assert (found, body["error"]["code"], body["error"]["type"]) == (status, code, "server_error")
    assert "/srv" not in body["error"]["message"]
    assert ("Traceback" in caplog.text) == (status == 500)


async def answer_of(app, path, answers=None):
    """Return status and JSON of an answer."""
    answers = [] if answers is None else answers

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        answers.append(message["status"] if "status" in message else json.loads(message["body"]))

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [], "http_version": "1.1"}
    await app({**scope, "scheme": "http", "server": ("127.0.0.1", 80), "client": None, "root_path": ""}, receive, send)
    return answers


class Planner:
    """Stand-in for a process that plans."""

    started, killed = 0, 0

    def __init__(self):
        self.asked = asyncio.Queue()

    @classmethod
    async def start(cls, *words):
        cls.started += 1
        await asyncio.sleep(0.01)
        return cls()

    async def send(self, **command):
        await self.asked.put(command)

    async def reports(self):
        while True:
            yield {"event": "plan", "settings": (await self.asked.get())["settings"]}

    def kill(self):
        type(self).killed += 1


def test_plans_that_are_asked_for_at_once_share_one_process(server, monkeypatch):
    monkeypatch.setattr(scheduling, "Process", Planner)

    async def run():
        return await asyncio.gather(*(server.scheduler.plan(number) for number in range(3)))

    assert [report["settings"] for report in asyncio.run(run())] == [0, 1, 2]
    assert Planner.started == 1


def test_a_plan_that_takes_too_long_is_an_error_of_the_planner(server, monkeypatch):
    monkeypatch.setattr(scheduling, "Process", Planner)
    monkeypatch.setattr(scheduling, "_PLAN_S", 0.2)

    async def run():
        with monkeypatch.context() as context:
            context.setattr(Planner, "reports", Worker.reports)
            assert "did not answer" in (await server.scheduler.plan("slow"))["error"]["message"]
        return await server.scheduler.plan("next")

    # A late report of the first plan would be that of the second one.
    assert asyncio.run(run())["settings"] == "next"
    assert Planner.killed == 1
