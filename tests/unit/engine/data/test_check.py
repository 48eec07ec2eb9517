"""What `--check-data` reports of a run's data."""

import json
from typing import Any

import pytest
from tiny_clips import write_rows

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.data.check import DataReport, check_data
from opensora_cli.settings.train import TrainSettings


def check(data: dict[str, Any], *, target: str = "vae", micro_batches: int = 1) -> DataReport:
    settings = TrainSettings.model_validate({"target": target, "data": data, "loop": {"micro_batches": micro_batches}})
    return check_data(settings, reporter=SilentReporter())


@pytest.fixture
def table(tmp_path):
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


def test_buckets_batches_and_bad_rows(table):
    report = check({"table": str(table), "buckets": {"64px": {1: (1.0, 2), 33: (1.0, 4)}}}, micro_batches=2)
    assert [(bad.row, bad.path, bad.reason) for bad in report.bad_rows] == [
        (15, "wrong.mp4", "num_frames=many must be a whole number over 0"),
        (16, "gone.mp4", "there is no such file"),
    ]
    assert [(b.resolution, b.num_frames, b.samples, b.micro_batches) for b in report.buckets] == [
        ("64px", 1, 4, 2),
        ("64px", 33, 10, 2),
    ]
    assert (report.rows, report.without_caption) == (17, 10)
    assert (report.micro_batches, report.micro_batches_of_update, report.updates) == (4, 2, 2)
    assert report.problems == ()
    report.raise_for_problems()
    document = json.loads(json.dumps(report.to_json()))
    assert document["schema"] == "osora.data-check/3"
    assert document["buckets"][1]["micro_batches"] == 2
    assert [line.split()[0] for line in report.lines()] == [
        "data",
        "bad",
        "bad",
        "caption",
        *("unused", "tiny.mp4:", "fix:"),
        "bucket",
        "bucket",
        "epoch",
    ]


def test_a_path_that_no_file_can_have_is_a_bad_row(tmp_path):
    paths = ["a" * 5000, "a/" * 3000]
    table = write_rows(tmp_path / "table.csv", [[path, "text", 1, 64, 64, ""] for path in paths])
    report = check({"table": str(table), "buckets": {"64px": {1: (1.0, 2)}}})
    assert [(bad.path, bad.reason) for bad in report.bad_rows] == [(path, "there is no such file") for path in paths]


def test_unused_rows_are_counted_by_reason(tmp_path):
    rows: list[list[object]] = [
        *([f"wide_{i}.mp4", "", 40, 360, 640, 30] for i in range(4)),
        ["tiny.mp4", "", 100, 20, 20, 12],
        ["short.mp4", "", 9, 64, 64, ""],
        *([f"fits_{i}.mp4", "", 60, 64, 64, 12] for i in range(3)),
        *([f"tall_{i}.mp4", "", 60, 128, 64, 12] for i in range(2)),
        ["picture.png", "", 1, 64, 64, ""],
    ]
    for row in rows:
        (tmp_path / str(row[0])).touch()
    table = write_rows(tmp_path / "table.csv", rows)
    data = {"table": str(table), "fps_max": 12, "buckets": {"64px": {17: (1.0, 3)}}}
    report = check(data)
    assert [(each.rows, each.reason, each.examples[0], each.fix) for each in report.unused] == [
        (
            1,
            "too small: 64px, the smallest resolution, takes 3,277 pixels or more",
            "tiny.mp4: 20x20, 100 frames at 12 fps",
            "add a smaller resolution to data.buckets",
        ),
        (1, "no bucket is for pictures of their size", "picture.png: 64x64", "add a bucket of 1 frame"),
        (
            5,
            "no bucket is for videos of their size and length",
            "wide_0.mp4: 640x360, 40 frames at 30 fps",
            "add a bucket with at most their frames to data.buckets, or raise data.fps_max if videos are faster",
        ),
        (
            2,
            "too few of one shape for 3 clips of data.buckets.64px.17",
            "tall_0.mp4: 64x128, 60 frames at 12 fps",
            "use a batch size of 2, or give more clips of each shape",
        ),
    ]
    assert [len(each.examples) for each in report.unused] == [1, 1, 3, 2]
    # Each fix uses the rows.
    fixed = {**data, "buckets": {"64px": {1: (1.0, 1), 17: (1.0, 2), 9: (1.0, 1)}, "20px": {9: (1.0, 1)}}}
    assert check(fixed).unused == ()
    faster = {**data, "fps_max": 15, "buckets": {"64px": {17: (1.0, 1)}}}
    assert [each.rows for each in check(faster).unused] == [1, 1, 1]
    closed = check({**data, "buckets": {"64px": {17: (0.0, 1), 129: (1.0, 1)}}}).unused[-1]
    assert (closed.rows, closed.reason) == (5, "their buckets have probability 0")
    (pictures_alone,) = check({**data, "buckets": {"16px": {1: (1.0, 1)}}}).unused
    assert (pictures_alone.rows, pictures_alone.reason) == (11, "no bucket is for videos of their size and length")


def test_an_empty_bucket_or_epoch_is_a_problem(table):
    bucket = check({"table": str(table), "buckets": {"64px": {1: (1.0, 5), 33: (1.0, 4), 129: (0.0, 1)}}})
    with pytest.raises(FileProblem, match="bucket 64px x 1 frame is empty: 4 samples in all shapes") as caught:
        bucket.raise_for_problems()
    assert "129" not in caught.value.message
    epoch = check({"table": str(table), "buckets": {"64px": {33: (1.0, 4)}}}, micro_batches=3)
    with pytest.raises(FileProblem, match="an epoch is empty: it has 2 micro-batches, and an update takes 3"):
        epoch.raise_for_problems()
