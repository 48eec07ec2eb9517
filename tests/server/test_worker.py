from types import SimpleNamespace

import pytest

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.server import worker
from opensora_cli.server.uploads import without_paths
from opensora_cli.server.worker import failure
from opensora_cli.settings.load import usual_settings
from opensora_cli.settings.tools import ServeSettings


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/srv/osora/jobs/video_1/reference_0_0123abcd.png is broken", "reference 1 is broken"),
        (
            "[Errno 2] No such file or directory: '/srv/my videos/a b.png'",
            "[Errno 2] No such file or directory: 'a b.png'",
        ),
        (
            "t5/model is missing (looked in /root/ckpts and the cache)",
            "t5/model is missing (looked in ckpts and the cache)",
        ),
        ("weights=/data/w: use ../other w/t5.safetensors, or ~/w", "weights=w: use t5.safetensors, or w"),
        ('File "/usr/lib/python3/x.py", line 3', 'File "x.py", line 3'),
        ("read file:///srv/a.txt, of https://example.org/a/b", "read a.txt, of https://example.org/a/b"),
        ("seconds=1/2 and/or 24 frames / s", "seconds=1/2 and/or 24 frames / s"),
    ],
)
def test_texts_name_no_folders(text, shown):
    assert without_paths({"error": [text, 1, None]}) == {"error": [shown, 1, None]}


def test_a_failure_and_its_traceback_name_no_folders(capfd):
    error = failure(CheckpointError("/srv/w/t5 is missing", hint="download it to /srv/w"))
    assert without_paths(error) == {
        "code": "CheckpointError",
        "message": "t5 is missing",
        "hint": "download it to w",
        "exit_code": 3,
    }
    with pytest.raises(ValueError, match="is odd") as bug:
        raise ValueError("/srv/secret/file.txt is odd")
    assert failure(bug.value)["code"] == "internal_error"
    logged = capfd.readouterr().err
    assert "file.txt is odd" in logged
    assert 'File "test_worker.py", line' in logged
    assert "/srv" not in logged


def test_the_state_is_due_after_each_interval_of_work(monkeypatch):
    now, due = [0.0], []
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def generate(settings, *, hooks, **_):
        for now[0] in (29.0, 31.0, 60.0, 62.0):
            due.append(hooks.wants_state())
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "generate", generate)
    job = {"id": "video_1", "folder": "", "save_every": ServeSettings().save_every}
    with pytest.raises(KeyboardInterrupt):
        worker.make_video(usual_settings("demo"), job, None, print, reporter=SilentReporter())
    assert due == [False, True, False, True]
