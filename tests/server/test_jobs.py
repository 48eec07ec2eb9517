import sqlite3

import pytest

from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.server.jobs import JobStore, Status, new_id

JOB = {"request": {"prompt": "sea", "model": "demo"}, "settings": {"prompt": "sea"}}


@pytest.fixture
def store(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite", max_queue=5)
    yield store
    store.close()


def add(store, count):
    return [store.add(new_id(), JOB).id for _ in range(count)]


def test_jobs_are_queued_in_order_and_outlive_the_store(store, tmp_path):
    ids = add(store, 3)
    assert store.ids(Status.QUEUED) == ids
    assert store.take().id == ids[0]
    store.requeue(ids[0], has_died=True)
    store.take()
    store.finish(ids[0], Status.FAILED, error={"code": "x", "message": "no memory"})
    store.close()
    again = JobStore(tmp_path / "jobs.sqlite", max_queue=5)
    job = again.get(ids[0])
    assert (job.status, job.error["message"], job.deaths) == ("failed", "no memory", 1)
    assert again.ids(Status.QUEUED) == ids[1:]
    assert again.counts() == {"queued": 2, "in_progress": 0, "completed": 0, "failed": 1, "cancelled": 0}
    again.close()


def test_a_job_that_is_put_back_is_next(store):
    ids = add(store, 3)
    store.take()
    store.requeue(ids[0])
    assert store.ids(Status.QUEUED) == ids
    assert [store.place_in_queue(store.get(each)) for each in ids] == [1, 2, 3]


def test_queued_jobs_are_moved(store):
    a, b, c = add(store, 3)
    store.move(c, before=a)
    assert store.ids(Status.QUEUED) == [c, a, b]
    store.move(c, before=None)
    assert store.ids(Status.QUEUED) == [a, b, c]
    store.take()
    with pytest.raises(RequestError, match="is not queued anymore"):
        store.move(b, before=a)
    with pytest.raises(RequestError, match="before itself"):
        store.move(b, before=b)
    with pytest.raises(KeyError):
        store.move("video_0", before=None)
    assert store.ids(Status.QUEUED) == [b, c]


def test_pages_have_every_job_once(store):
    ids = add(store, 5)
    first, more = store.page(after=None, limit=2, newest_first=True)
    second, _ = store.page(after=first[-1].id, limit=2, newest_first=True)
    third, no_more = store.page(after=second[-1].id, limit=2, newest_first=True)
    assert [job.id for job in (*first, *second, *third)] == ids[::-1]
    assert (more, no_more) == (True, False)
    assert [job.id for job in store.page(after=ids[0], limit=9, newest_first=False)[0]] == ids[1:]
    with pytest.raises(KeyError):
        store.page(after="video_0", limit=1, newest_first=True)


def test_other_files_and_versions_are_refused(tmp_path):
    path = tmp_path / "jobs.sqlite"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(CheckpointError, match="is not a file of jobs"):
        JobStore(path, max_queue=5)
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version=9")
    with pytest.raises(CheckpointError, match="version 9"):
        JobStore(path, max_queue=5)
