import weakref

import pytest
from PIL import Image

from opensora_cli.media.read import is_picture
from opensora_cli.server import results
from opensora_cli.server.results import SHEET, THUMBNAIL, write_extras
from opensora_cli.server.uploads import stand_in


@pytest.mark.parametrize(("count", "cells"), [(1, 1), (25, 25), (26, 13), (129, 17)])
def test_a_sheet_holds_few_frames_of_any_video(count, cells, tmp_path, monkeypatch):
    made, most = [], 0

    def frames(_):
        nonlocal most
        for number in range(count):
            frame = Image.new("RGB", (320, 160), (number + 1, 0, 0))
            made.append(weakref.ref(frame))
            most = max(most, sum(each() is not None for each in made))
            yield frame

    monkeypatch.setattr(results, "_frames_of", frames)
    write_extras(tmp_path / "video.mp4", tmp_path)
    with Image.open(tmp_path / SHEET) as sheet:
        columns = min(cells, 5)
        assert sheet.size == (columns * 160, -(-cells // 5) * 80)
        row, column = divmod(cells - 1, 5)
        last = sheet.getpixel((column * 160 + 80, row * 80 + 40))[0]
    every = {1: 1, 25: 1, 26: 2, 129: 8}[count]
    assert last == pytest.approx((count - 1) // every * every + 1, abs=3)
    with Image.open(tmp_path / THUMBNAIL) as thumbnail:
        assert thumbnail.size == (320, 160)
    assert most <= 2


def test_stand_ins_are_a_picture_and_a_video(tmp_path):
    assert is_picture(stand_in("picture", tmp_path / "plan"))
    video = stand_in("video", tmp_path / "plan")
    assert not is_picture(video)
    assert sum(1 for _ in results._frames_of(video)) == 300
