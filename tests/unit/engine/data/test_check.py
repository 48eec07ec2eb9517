"""What `--check-data` reports of a run's data."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_clips import write_rows

from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.data.check import DataReport, check_data
from opensora_cli.settings.train import TrainSettings


def check(data: dict[str, Any], *, target: str = "vae", micro_batches: int = 1) -> DataReport:
    settings = TrainSettings.model_validate({"target": target, "data": data, "loop": {"micro_batches": micro_batches}})
    return check_data(settings, reporter=SilentReporter())


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Ten clips, four pictures, and a bad one of each kind."""
    rows: list[list[object]] = [[f"clip_{i}.mp4", "", 40, 64, 64, 24] for i in range(10)]
    rows += [[f"picture_{i}.png", "text", 1, 64, 64, ""] for i in range(4)]
    rows += [
        ["wrong.mp4", "text", "many", 64, 64, 24],
        ["gone.mp4", "text", 40, 64, 64, 24],
        ["tiny.mp4", "text", 40, 16, 16, 24],
    ]
    for row in rows:
        if row[0] != "gone.mp4":
            (tmp_path / str(row[0])).touch()
    return write_rows(tmp_path / "table.csv", rows)


def test_buckets_batches_and_bad_rows(table: Path) -> None:
    report = check({"table": str(table), "buckets": {"64px": {1: (1.0, 2), 33: (1.0, 4)}}}, micro_batches=2)
    assert [(bad.row, bad.path, bad.reason) for bad in report.bad_rows] == [
        (15, "wrong.mp4", "num_frames=many must be a whole number over 0"),
        (16, "gone.mp4", "there is no such file"),
    ]
    assert [(b.resolution, b.num_frames, b.samples, b.micro_batches) for b in report.buckets] == [
        ("64px", 1, 4, 2),
        ("64px", 33, 10, 2),
    ]
    assert (report.rows, report.without_caption, report.without_bucket) == (17, 10, 1)
    assert (report.micro_batches, report.micro_batches_of_update, report.updates) == (4, 2, 2)
    assert report.problems == ()
    report.require_batches()
    document = json.loads(json.dumps(report.to_json()))
    assert document["schema"] == "osora.data-check/1"
    assert document["buckets"][1]["micro_batches"] == 2
    assert [line.split()[0] for line in report.lines()] == [
        "data",
        "bad",
        "bad",
        "caption",
        "bucket",
        "bucket",
        "bucket",
        "epoch",
    ]


def test_an_empty_bucket_is_a_problem(table: Path) -> None:
    report = check({"table": str(table), "buckets": {"64px": {1: (1.0, 5), 33: (1.0, 4), 129: (0.0, 1)}}})
    with pytest.raises(FileProblem, match="bucket 64px x 1 frame is empty: 4 samples in all shapes") as caught:
        report.require_batches()
    assert "129" not in caught.value.message
    assert caught.value.hint is not None


def test_an_empty_epoch_is_a_problem(table: Path) -> None:
    report = check({"table": str(table), "buckets": {"64px": {33: (1.0, 4)}}}, micro_batches=3)
    with pytest.raises(FileProblem, match="an epoch is empty: it has 2 micro-batches, and an update takes 3"):
        report.require_batches()


def test_files_that_are_gone_fill_no_bucket(table: Path) -> None:
    for path in table.parent.glob("clip_*"):
        path.unlink()
    report = check({"table": str(table), "buckets": {"64px": {1: (1.0, 2), 33: (1.0, 4)}}})
    assert len(report.bad_rows) == 12
    with pytest.raises(FileProblem, match="bucket 64px x 33 frames is empty: 0 samples"):
        report.require_batches()


def test_scenes_are_counted_too() -> None:
    scenes = {
        "size": 64,
        "num_frames": 17,
        "count": 40,
        "batch_size": 3,
        "picture_share": 0.25,
        "picture_batch_size": 5,
    }
    report = check({"scenes": scenes})
    assert [(b.name, b.samples, b.micro_batches) for b in report.buckets] == [
        ("64px x 17 frames", 30, 10),
        ("64px x 1 frame", 10, 2),
    ]
    assert report.updates == 12
    report.require_batches()


def test_captions_are_not_clips() -> None:
    settings = TrainSettings.model_validate({"target": "text"})
    with pytest.raises(RequestError, match="target=text has no clips"):
        check_data(settings, reporter=SilentReporter())
