"""Micro-batches of clips from files, and from a source of one's own."""

from pathlib import Path
from typing import Any

import pytest
import tiny_training
import torch
from tiny_clips import FPS, clip_table, frame_number
from tiny_source import Colors
from tiny_world import RecordingReporter

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import MediaError
from opensora_cli.data.batches import ClipBatch, ClipRequest, ClipSource
from opensora_cli.engine.encode.datasets import open_batches, open_table
from opensora_cli.settings.train import TrainSettings

BUCKETS = {"64px": {1: (1.0, 2), 5: (1.0, 3)}}
WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_table(tmp_path_factory.mktemp("clips"))


def settings(table: Path, **data: Any) -> TrainSettings:
    return of_data({"table": str(table), "buckets": BUCKETS, "workers": 0, **data})


def of_data(data: dict[str, Any]) -> TrainSettings:
    base = tiny_training.mmdit_settings(Path("unused")).model_dump(mode="json")
    modes = {"mode_weights": {mode: float(mode == "t2v") for mode in CONDITION_MODES}}
    return TrainSettings.model_validate({**base, "data": data, "loop": {"seed": 0}, "train_mmdit": modes})


def take(
    settings: TrainSettings,
    count: int,
    *,
    reporter: RecordingReporter | None = None,
    load: Any = None,
    source: ClipSource | None = None,
) -> list[ClipBatch]:
    reporter = reporter or RecordingReporter()
    batches = open_batches(settings, data_rank=0, data_ranks=1, reporter=reporter, load=load, source=source)
    try:
        return [batches.next() for _ in range(count)]
    finally:
        batches.close()


def described(batch: ClipBatch) -> tuple[object, ...]:
    pixels = None if batch.pixels_BTHWC is None else batch.pixels_BTHWC.numpy().tobytes()
    return (batch.number, batch.epoch, batch.requests, pixels)


def test_an_epoch_has_every_sample_once_in_batches_of_one_shape(table: Path) -> None:
    batches = take(settings(table), 4)
    assert sorted(path for batch in batches for path in batch.paths) == sorted(
        str(table.parent / name)
        for name in [f"clip_{i}.mp4" for i in range(6)] + [f"picture_{i}.png" for i in range(4)]
    )
    for batch in batches:
        is_picture = "picture" in batch.paths[0]
        assert batch.pixels_BTHWC is not None
        assert batch.pixels_BTHWC.shape == ((2, 1, 64, 64, 3) if is_picture else (3, 5, 64, 64, 3))
        assert batch.pixels_BTHWC.dtype == torch.uint8
        for request in batch.requests:
            kind, number = Path(request.path).stem.split("_")
            assert request.caption == f"{kind} number {number}"
            assert (request.fps, request.motion_score) == (0.0 if is_picture else FPS, None)


def test_clips_begin_anywhere_and_their_frames_follow_each_other(table: Path) -> None:
    starts = []
    for batch in take(settings(table), 20):
        assert batch.pixels_BTHWC is not None
        for clip_THWC in batch.pixels_BTHWC:
            numbers = [frame_number(frame) for frame in clip_THWC]
            assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
            starts += [numbers[0]] if len(numbers) > 1 else []
    assert set(starts) == {*range(9)}


@pytest.fixture
def broken_table(tmp_path: Path) -> Path:
    table = clip_table(tmp_path, clips=7, pictures=0)
    (tmp_path / "clip_3.mp4").write_bytes(b"not a video")
    return table


def test_a_broken_sample_is_replaced_by_the_next_and_warned_of_once(broken_table: Path) -> None:
    warned = RecordingReporter()
    data = settings(broken_table, workers=2, buckets={"64px": {5: (1.0, 3)}})
    batches = take(data, 10, reporter=warned)
    broken = str(broken_table.parent / "clip_3.mp4")
    replaced = [replacement for batch in batches for replacement in batch.replaced]
    assert len(replaced) >= 3
    assert {replacement.path for replacement in replaced} == {broken}
    assert all(len(batch.paths) == 3 and broken not in batch.paths for batch in batches)
    assert all(replacement.by in batch.paths for batch in batches for replacement in batch.replaced)
    assert len(warned.warnings) == 1
    assert "clip_3.mp4" in warned.warnings[0]
    again = take(data.replace({"data.workers": 0}), 10)
    assert [described(batch) for batch in again] == [described(batch) for batch in batches]


def refusing(request: ClipRequest) -> str:
    """Act as a cache that lacks a clip."""
    if "clip_3" in request.path:
        raise MediaError(f"{request.path} is not in the cache")
    return f"{request.path} from {request.start}"


@WORKERS
def test_a_loader_replaces_decoding_with_fixed_starts(table: Path, workers: int) -> None:
    warned = RecordingReporter()
    batches = take(settings(table, workers=workers), 8, reporter=warned, load=refusing)
    for batch in batches:
        assert batch.pixels_BTHWC is None
        assert batch.cached == tuple(f"{path} from 0" for path in batch.paths)
    assert ["clip_3.mp4 is not in the cache" in text for text in warned.warnings] == [True]


def test_all_requests_are_those_of_the_epochs(table: Path) -> None:
    data = settings(table, buckets={"64px": {1: (1.0, 2), 9: (0.5, 1)}, "32px": {1: (1.0, 1), 5: (1.0, 1)}})
    every = [*open_table(data, fixed_starts=True).requests()]
    assert len(every) == 4 + 2 * 6
    found: set[ClipRequest] = set()
    for batch in take(data, 60, load=_as_is):
        assert batch.cached is not None
        found |= {*batch.cached}
    assert found == {*every}
    assert {(request.num_frames, request.start) for request in found} == {(1, 0), (9, 0), (5, 0)}


def _as_is(request: ClipRequest) -> ClipRequest:
    return request


@WORKERS
def test_clips_of_a_source_of_ones_own(workers: int) -> None:
    reporter = RecordingReporter()
    batches = take(of_data({"workers": workers}), 5, source=Colors(pictures=True, faded=4), reporter=reporter)
    shapes = sorted(tuple(batch.pixels_BTHWC.shape[:2]) for batch in batches if batch.pixels_BTHWC is not None)
    assert shapes == [(2, 5)] * 3 + [(3, 1)] * 2
    assert {request.fps for batch in batches for request in batch.requests} == {12.0, 0.0}
    [replacement] = [each for batch in batches for each in batch.replaced]
    assert (replacement.path, replacement.reason) == ("color:4", "color:4 has faded")
    assert len(reporter.warnings) == 1
    for batch in batches:
        assert batch.pixels_BTHWC is not None
        assert [f"color:{level // 10}" for level in batch.pixels_BTHWC[:, 0, 0, 0, 0].tolist()] == list(batch.paths)
