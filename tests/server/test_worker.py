from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.media.read import is_picture, read_video
from opensora_cli.media.write import write_media
from opensora_cli.server import worker
from opensora_cli.server.jobs import SHEET, THUMBNAIL
from opensora_cli.server.uploads import stand_in, without_paths
from opensora_cli.server.worker import failure, write_extras
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


@pytest.mark.parametrize(("count", "cells"), [(1, 1), (25, 25), (26, 13), (129, 22)])
def test_a_sheet_holds_few_frames_of_any_video(count, cells, tmp_path):
    frames = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(count, 160, 320, 3)
    path = write_media([frames], tmp_path / "video", fps=12, format="png" if count == 1 else "mp4")
    write_extras(path, tmp_path)
    with Image.open(tmp_path / SHEET) as sheet:
        assert sheet.size == (min(cells, 5) * 160, -(-cells // 5) * 80)
        row, column = divmod(cells - 1, 5)
        last = sheet.getpixel((column * 160 + 80, row * 80 + 40))[0]
    every = {1: 1, 25: 1, 26: 2, 129: 6}[count]
    assert last == pytest.approx((count - 1) // every * every, abs=3)
    with Image.open(tmp_path / THUMBNAIL) as thumbnail:
        assert thumbnail.size == (320, 160)


def test_stand_ins_are_a_picture_and_a_video(tmp_path):
    assert is_picture(stand_in("picture", tmp_path))
    assert len(read_video(stand_in("video", tmp_path)).frames_THWC) == 300
