"""A job runs in the foreground where no thread can be started."""

import threading

import pytest

from opensora_cli.checkpoint.background import BackgroundJob


def test_where_no_thread_can_be_started_it_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    job, done = BackgroundJob(), []
    job.start(lambda: done.append(1))
    assert done == [1]
    job.join()

    def fail() -> None:
        raise OSError("the disk is full")

    job.start(fail)
    assert isinstance(job.take_error(), OSError)
