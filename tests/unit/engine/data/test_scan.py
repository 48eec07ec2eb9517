"""From folders to tables, parts and contact sheets."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hostile_files import CAPTIONS
from PIL import Image
from tiny_clips import write_clip

from opensora_cli.core.exceptions import BatchError, FileProblem, OutputError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.table import COLUMNS, read_columns, read_table
from opensora_cli.engine.data import scan as scan_module
from opensora_cli.engine.data.scan import ScanResult, preview, scan
from opensora_cli.settings.tools import PreviewSettings, ScanSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three videos and a picture, one of them in a folder of its own."""
    folder = tmp_path / "clips"
    (folder / "more").mkdir(parents=True)
    write_clip(folder / "b.mp4", num_frames=5, height=48, width=64, caption="from a text\nof two lines\n")
    write_clip(folder / "a.png", num_frames=1, height=32, width=32)
    (folder / "a.json").write_text(json.dumps({"caption": "from JSON"}))
    write_clip(folder / "more" / "c.mp4", num_frames=7, fps=30, caption="in a folder")
    write_clip(folder / "more" / "d.mp4", num_frames=3)
    (folder / "notes.md").write_text("not a clip")
    (folder / ".hidden.mp4").write_bytes(b"left out")
    return folder


def run(folder: Path, **changes: Any) -> ScanResult:
    return scan(ScanSettings(folder=str(folder), workers=2, **changes))


def test_two_scans_to_one_table_leave_one_whole_and_one_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows = scan_module.write_table
    refused = []

    def meanwhile(*args: Any, **options: Any) -> None:
        for overwrite in (False, True):
            with pytest.raises(OutputError, match=r"another run writes .*clips\.csv: process \d+ on "):
                run(folder, overwrite=overwrite)
            refused.append(overwrite)
        write_rows(*args, **options)

    monkeypatch.setattr(scan_module, "write_table", meanwhile)
    assert run(folder).rows == 4
    assert refused == [False, True]


def test_a_folder_becomes_a_table(folder: Path) -> None:
    result = run(folder)
    assert (result.table, result.videos, result.pictures) == (folder.with_suffix(".csv"), 3, 1)
    assert (result.without_caption, result.broken) == (1, ())
    columns = read_columns(result.table, COLUMNS)
    names = ["a.png", "b.mp4", "more/c.mp4", "more/d.mp4"]
    assert columns["path"] == [str(folder / name) for name in names]
    assert columns["text"] == ["from JSON", "from a text of two lines", "in a folder", ""]
    assert columns["num_frames"] == ["1", "5", "7", "3"]
    assert columns["height"] == ["32", "48", "64", "64"]
    assert columns["width"] == ["32", "64", "64", "64"]
    assert columns["aspect_ratio"] == ["1.0", "0.75", "1.0", "1.0"]
    assert columns["resolution"] == ["1024", "3072", "4096", "4096"]
    assert columns["fps"] == ["", "24.0", "30.0", "24.0"]
    assert len(read_table(result.table)) == 4


def test_a_name_that_is_not_utf_8_is_listed_as_broken(folder: Path) -> None:
    (folder / "a.png").rename(folder / "\udce9.png")
    result = run(folder)
    assert (result.rows, [file.path for file in result.broken]) == (3, [f"{folder}/\\udce9.png"])
    assert result.broken[0].reason == f"{folder}/\\udce9.png is no name in UTF-8: rename it"


def test_broken_files_are_listed_and_left_out_until_they_are_fixed(folder: Path) -> None:
    (folder / "broken.mp4").write_bytes(b"nothing")
    (folder / "b.txt").write_bytes(b"\xff\xfe\xff")
    (folder / "a.json").write_text("{}")
    result = run(folder)
    assert [Path(file.path).name for file in result.broken] == ["a.png", "b.mp4", "broken.mp4"]
    assert [
        name in file.reason for name, file in zip(("a.json", "b.txt", "broken.mp4"), result.broken, strict=True)
    ] == [True] * 3
    assert (result.videos, result.pictures) == (2, 0)
    assert len(read_table(result.table)) == 2
    with pytest.raises(BatchError, match="3 files or folders cannot be read"):
        result.raise_for_problems()
    write_clip(folder / "broken.mp4", num_frames=4)
    (folder / "b.txt").unlink()
    (folder / "a.json").unlink()
    again = run(folder, overwrite=True)
    assert (again.broken, again.videos, again.pictures) == ((), 4, 1)
    again.raise_for_problems()


@pytest.mark.parametrize("kind", [".csv", ".parquet"])
def test_a_caption_that_cannot_be_used_is_listed_and_the_others_are_in_the_table(tmp_path: Path, kind: str) -> None:
    if kind == ".parquet":
        pytest.importorskip("pyarrow")
    folder = tmp_path / "clips"
    folder.mkdir()
    names = [f"{number:02}" for number in range(len(CAPTIONS))]
    for name, (ending, content, _) in zip(names, CAPTIONS.values(), strict=True):
        write_clip(folder / f"{name}.png", num_frames=1, height=8, width=8)
        (folder / f"{name}{ending}").write_bytes(content)
    write_clip(folder / "sound.png", num_frames=1, height=8, width=8, caption="fine")
    result = run(folder, table=str(tmp_path / f"table{kind}"))
    assert [Path(file.path).stem for file in result.broken] == names
    for name, file, (ending, _, reason) in zip(names, result.broken, CAPTIONS.values(), strict=True):
        assert f"{folder / name}{ending}" in file.reason
        assert reason in file.reason
        assert file.reason.isprintable()
    assert read_columns(result.table, ["path", "text"]) == {"path": [str(folder / "sound.png")], "text": ["fine"]}
    with pytest.raises(BatchError, match=f"{len(CAPTIONS)} files or folders cannot be read"):
        result.raise_for_problems()


class Interrupting(SilentReporter):
    """Presses Ctrl-C after so many files."""

    def __init__(self, files: int) -> None:
        self._left = files

    def advance(self, amount: int = 1) -> None:
        self._left -= amount
        if self._left == 0:
            raise KeyboardInterrupt


def test_an_interrupted_scan_writes_nothing(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match="no table is written: scan again"):
        scan(ScanSettings(folder=str(folder), workers=1), reporter=Interrupting(2))
    assert not folder.with_suffix(".csv").exists()
    assert len(read_table(run(folder).table)) == 4


def test_a_table_is_replaced_only_on_request(folder: Path) -> None:
    table = run(folder).table
    table.write_text(table.read_text().replace("from JSON", "a better caption"))
    with pytest.raises(OutputError, match="exists already"):
        run(folder)
    assert "a better caption" in table.read_text()
    (folder / "more" / "c.mp4").unlink()
    assert run(folder, overwrite=True).rows == 3
    assert "from JSON" in table.read_text()


def test_a_folder_without_clips_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="has no pictures or videos"):
        run(tmp_path)


def test_files_of_other_kinds_are_counted(folder: Path) -> None:
    for name in ("e.psd", "more/f.PSD", "metadata.jsonl", "README", "lost.txt"):
        (folder / name).write_text("x")
    run(folder, table=str(folder / "table.csv"))
    result = run(folder, table=str(folder / "table.csv"), overwrite=True)
    assert result.other_files == {".psd": 2, ".md": 1, ".jsonl": 1, "": 1, ".txt": 1}
    assert "skipped   2 .psd, 1 " in "\n".join(result.lines())


def test_videos_of_varying_rate_are_named(folder: Path) -> None:
    with av.open(str(folder / "varies.mp4"), "w") as container:
        track = container.add_stream("libx264", rate=25)
        track.height = track.width = 32
        track.pix_fmt = "yuv420p"
        for time in [*range(10), *range(10, 40, 5)]:
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 25)
            container.mux(track.encode(frame))
        container.mux(track.encode(None))
    result = run(folder)
    assert result.uneven == (folder / "varies.mp4",)
    assert "uneven    varies.mp4: the frame rate varies" in "\n".join(result.lines())


def test_a_contact_sheet_shows_frames_of_every_sample(folder: Path) -> None:
    table = run(folder).table
    sheet = folder / "sheet.png"
    result = preview(PreviewSettings(table=str(table), sheet=str(sheet)))
    assert (result.shown, result.rows, result.broken) == (4, 4, ())
    pixels = np.asarray(Image.open(sheet).convert("RGB"), dtype=int)
    # One below the other; the ground has the level 32, and the first frames have 20.
    assert pixels.shape[1] > 480
    first = (pixels.max(axis=2) < 26) & (pixels.min(axis=2) > 14)
    for cell in np.array_split(first, 4):
        assert cell.sum() > 500
    with pytest.raises(OutputError, match="exists already"):
        preview(PreviewSettings(table=str(table), sheet=str(sheet)))


def test_a_contact_sheet_says_what_it_cannot_show(folder: Path) -> None:
    table = run(folder).table
    (folder / "b.mp4").unlink()
    sheet = folder / "sheet.webp"
    result = preview(PreviewSettings(table=str(table), sheet=str(sheet), count=1000))
    assert (result.shown, len(result.broken)) == (4, 1)
    assert sheet.is_file()
    with pytest.raises(BatchError, match=r"1 of 4 samples cannot be read\n.*b\.mp4"):
        result.raise_for_problems()
