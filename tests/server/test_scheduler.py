"""The scheduler and the events of a server, without its processes."""

import asyncio
import json

import pytest

from opensora_cli.server import scheduler as scheduling
from opensora_cli.server.jobs import JobStore, Status
from opensora_cli.server.scheduler import PlanFailed, Scheduler
from opensora_cli.server.videos import Server, _events_of

REQUEST = {"prompt": "sea", "model": "demo", "seconds": "1", "size": "256px", "settings": {}, "seed": 1}
REQUEST |= {"num_frames": 5, "fps": 24, "num_references": 0}


@pytest.fixture
def server(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite")
    store.add(REQUEST, {}, job_id="video_1", max_queue=5)
    scheduler = Scheduler(store, tmp_path, groups=0)
    yield Server(store=store, scheduler=scheduler, folder=tmp_path, model="demo", base={}, max_queue=5, token=None)
    store.close()


def test_a_cancelled_video_stays_cancelled_when_the_server_is_killed_before_it_ends(server):
    server.store.take()
    asyncio.run(server.scheduler.cancel("video_1"))
    assert server.store.get("video_1").status is Status.IN_PROGRESS
    asyncio.run(Scheduler(server.store, server.folder, groups=0).run())
    assert server.store.get("video_1").status is Status.CANCELLED


def test_videos_that_a_killed_server_made_are_first_and_keep_their_order(server):
    for number in (2, 3):
        server.store.add(REQUEST, {}, job_id=f"video_{number}", max_queue=5)
    for _ in range(2):
        server.store.take()
    asyncio.run(server.scheduler.run())
    assert server.store.ids(Status.QUEUED) == ["video_1", "video_2", "video_3"]


def test_the_events_of_a_deleted_video_end(server):
    async def run():
        events = _events_of(server, "video_1")
        found = [await anext(events)]
        await server.scheduler.delete("video_1")
        return found + [event async for event in events]

    found = asyncio.run(asyncio.wait_for(run(), 10))
    assert [json.loads(text.splitlines()[1][6:])["event"] for text in found] == ["state", "deleted"]


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


class Planner:
    """Stand-in for a process that plans."""

    started = 0

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
            yield {"event": "plan", "id": (await self.asked.get())["id"]}


def test_plans_that_are_asked_for_at_once_share_one_process(server, monkeypatch):
    monkeypatch.setattr(scheduling, "Process", Planner)

    async def run():
        return await asyncio.gather(*(server.scheduler.plan({}) for _ in range(3)))

    assert [report["event"] for report in asyncio.run(run())] == ["plan"] * 3
    assert Planner.started == 1


def test_a_plan_that_takes_too_long_is_an_error_of_the_planner(server, monkeypatch):
    monkeypatch.setattr(scheduling, "Process", Planner)
    monkeypatch.setattr(scheduling, "_PLAN_S", 0.0)
    with pytest.raises(PlanFailed, match="did not answer"):
        asyncio.run(server.scheduler.plan({}))
