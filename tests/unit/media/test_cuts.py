"""Probing files, and reading cuts of them: the very frames that reading from the start gives."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from opensora_cli.core.exceptions import MediaError
from opensora_cli.media import containers
from opensora_cli.media.read import probe, read_cut, read_video
from opensora_cli.media.write import write_media

NUM_FRAMES = 30


def frames() -> torch.Tensor:
    """A bright column that walks through the picture, so that every frame differs."""
    clip = torch.full((NUM_FRAMES, 48, 64, 3), 30, dtype=torch.uint8)
    for index in range(NUM_FRAMES):
        clip[index, :, 2 * index % 64] = 220
    return clip


def encode(path: Path, *, codec: str, times: list[int] | None = None) -> Path:
    """Write a video with a key frame every 6 frames, shown at `times` (milliseconds) if they are given."""
    with av.open(str(path), mode="w") as container:
        track = container.add_stream(codec, rate=24)
        track.width, track.height, track.pix_fmt = 64, 48, "yuv420p"
        track.gop_size = 6
        if times is not None:
            track.codec_context.time_base = Fraction(1, 1000)
        for index, pixels in enumerate(frames()):
            frame = av.VideoFrame.from_ndarray(pixels.numpy(), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[index], Fraction(1, 1000)
            container.mux(track.encode(frame))
        container.mux(track.encode(None))
    return path


CODECS = {"a.mp4": "libx264", "a.mkv": "libx264", "a.avi": "mpeg4", "a.ts": "libx264", "a.webm": "libvpx-vp9"}


@pytest.fixture(scope="module", params=CODECS)
def video(request, tmp_path_factory):
    return encode(tmp_path_factory.mktemp("video") / request.param, codec=CODECS[request.param])


def cut(path: Path, start: int, num_frames: int, interval: int = 1) -> torch.Tensor:
    return torch.stack([*read_cut(path, start=start, num_frames=num_frames, interval=interval)])


def test_a_cut_has_the_frames_that_reading_from_the_start_gives(video):
    every = read_video(video).frames_THWC
    assert len(every) == NUM_FRAMES
    for start in (0, 1, 5, 6, 7, 11, 13, 25):
        assert torch.equal(cut(video, start, 5), every[start : start + 5]), start
    for start, interval in ((0, 2), (7, 3), (13, 4)):
        assert torch.equal(cut(video, start, 5, interval), every[start : start + 4 * interval + 1 : interval])


@pytest.fixture
def entered(monkeypatch):
    """Whether each file that was cut could be entered in its middle."""
    found: list[bool] = []
    seek = containers._frames_after_seeking

    def spy(*args: object, **kwargs: object) -> object:
        frames = seek(*args, **kwargs)
        found.append(frames is not None)
        return frames

    monkeypatch.setattr(containers, "_frames_after_seeking", spy)
    return found


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_frames_that_are_shown_for_unequal_times_are_entered_at_the_right_one(tmp_path, entered, name):
    times = np.cumsum(np.random.default_rng(0).choice([10, 20, 100], size=NUM_FRAMES)).tolist()
    path = encode(tmp_path / name, codec="libx264", times=times)
    every = read_video(path).frames_THWC
    assert len(every) == NUM_FRAMES
    for start in range(NUM_FRAMES):
        assert torch.equal(cut(path, start, 1)[0], every[start]), start
    assert len(entered) == NUM_FRAMES - 1
    assert sum(entered) > 20  # the others are counted from the start


def test_a_cut_that_is_not_there_is_an_error(video):
    with pytest.raises(MediaError, match=r"ends after 2 of 5 frames"):
        cut(video, NUM_FRAMES - 2, 5)
    with pytest.raises(MediaError, match=r"ends after 0 of 1 frames"):
        cut(video, NUM_FRAMES + 10, 1)


def test_a_video_that_is_cut_off_is_broken(tmp_path):
    path = write_media(
        [torch.from_numpy(np.random.default_rng(0).integers(0, 255, (20, 48, 64, 3), dtype=np.uint8))],
        tmp_path / "a.mp4",
        fps=24,
        format="mp4",
    )
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(MediaError, match="cut off"):
        probe(path)
