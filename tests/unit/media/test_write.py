"""What is written is what was given, whole, playable, and the same every time."""

import errno
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.exceptions import OutputError
from opensora_cli.media import write
from opensora_cli.media.read import read_picture, read_video
from opensora_cli.media.results import media_path, read_tags
from opensora_cli.media.write import write_media

TAGS = {"prompt": 'Ein "Boot"; = 海\nnew line \\ 🌊', "seed": "42", "software": "osora 0.1.0"}


@pytest.mark.parametrize(("format_", "fps", "tolerance"), [("mp4", 23.976, 3.0), ("gif", 24, 8.0)])
def test_frames_their_size_and_colours_and_the_length_are_those_given(tmp_path, moving_frames, format_, fps, tolerance):
    path = write_media([moving_frames], tmp_path / f"a.{format_}", fps=fps, format=format_)
    clip = read_video(path)
    assert clip.frames_THWC.shape == moving_frames.shape
    assert (clip.frames_THWC.float() - moving_frames.float()).abs().mean() < tolerance
    assert len(clip.frames_THWC) / clip.fps == pytest.approx(9 / fps, abs=0.006)  # GIF counts hundredths
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("level", [0, 127, 200])
def test_grey_comes_back_from_mp4_as_it_was(tmp_path, level):
    frames = torch.full((3, 32, 32, 3), level, dtype=torch.uint8)
    clip = read_video(write_media([frames], tmp_path / "a.mp4", fps=12, format="mp4"))
    # PyAV's usual conversion returns each of these one level darker, and again after each further round.
    assert (clip.frames_THWC.float() - level).mean().abs() < 0.5


def test_mp4_is_what_ordinary_players_open(tmp_path, moving_frames):
    path = write_media([moving_frames], tmp_path / "a.mp4", fps=12, format="mp4")
    with av.open(str(path)) as container:
        track = container.streams.video[0]
        assert track.codec_context.name == "h264"
        assert track.codec_context.pix_fmt == "yuv420p"
        assert track.average_rate == 12
        assert track.frames == 9
        assert float(track.duration * track.time_base) == pytest.approx(9 / 12)
        assert [frame.time for frame in container.decode(track)] == pytest.approx([index / 12 for index in range(9)])
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")


@pytest.mark.parametrize("format_", [*MediaFormat])
def test_metadata_comes_back_and_without_any_there_is_none(tmp_path, moving_frames, format_):
    # A very long prompt, and bytes that no format holds.
    hard = {"prompt": "海 and " * 1000, "seed": "caf\udce9\0"}
    for tags, expected in ((TAGS, TAGS), (hard, {**hard, "seed": "caf?"}), ({}, {})):
        path = write_media([moving_frames[:2]], tmp_path / f"a.{format_}", fps=12, format=format_, metadata=tags)
        metadata = read_tags(path)
        assert {key: metadata[key] for key in tags} == expected
    assert metadata == {}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the number of processors cannot be limited here")
def test_mp4_bytes_do_not_depend_on_the_number_of_processors(tmp_path, moving_frames):
    frames = moving_frames.repeat_interleave(4, dim=1).repeat_interleave(4, dim=2)  # enough rows for several threads
    with_all = write_media([frames], tmp_path / "all.mp4", fps=12, format="mp4")
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        with_one = write_media([frames], tmp_path / "one.mp4", fps=12, format="mp4")
    finally:
        os.sched_setaffinity(0, processors)
    assert with_one.read_bytes() == with_all.read_bytes()


def test_several_frames_as_png_are_a_folder_of_numbered_pictures(tmp_path, moving_frames):
    for _ in range(2):  # the second time it replaces the first
        path = write_media([moving_frames], tmp_path / "a.png", fps=12, format="png")
    assert path == tmp_path / "a" == media_path(tmp_path / "a.png", format="png", num_frames=9)
    assert os.listdir(tmp_path) == ["a"]
    assert sorted(os.listdir(path)) == [f"frame_{number:04d}.png" for number in range(1, 10)]
    assert torch.equal(read_picture(path / "frame_0009.png"), moving_frames[8])


def test_an_odd_size_is_refused_for_mp4_only(tmp_path, moving_frames):
    frames = moving_frames[:, :63, :95]
    with pytest.raises(OutputError, match="not 95x63") as caught:
        write_media([frames], tmp_path / "a.mp4", fps=12, format="mp4")
    assert "--format" in str(caught.value.hint)
    path = write_media([frames], tmp_path / "a.gif", fps=12, format="gif")
    assert read_video(path).frames_THWC.shape == (9, 63, 95, 3)


@pytest.mark.parametrize("format_", [*MediaFormat])
def test_a_disk_that_fills_up_leaves_the_old_file_and_nothing_else(tmp_path, moving_frames, format_):
    resource = pytest.importorskip("resource")
    noise = torch.randint(0, 256, (6, 160, 160, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    target = write_media([moving_frames], tmp_path / f"a.{format_}", fps=12, format=format_)
    before = read_tags(target), sorted(path.stat().st_size for path in target.parent.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OutputError, match=os.strerror(errno.EFBIG)) as caught:
            write_media([noise], tmp_path / f"a.{format_}", fps=12, format=format_)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(target) in caught.value.message
    assert "\n" not in caught.value.message
    assert (read_tags(target), sorted(path.stat().st_size for path in target.parent.rglob("*"))) == before
    assert os.listdir(tmp_path) == [target.name]


@pytest.mark.parametrize(
    ("format_", "sizes"),
    [("mp4", [1] * 9), ("gif", [1, 6, 2]), ("png", [1, 6, 2])],
    ids=str,
)
def test_pieces_make_the_same_file_as_the_whole(tmp_path, moving_frames, format_, sizes):
    whole = write_media([moving_frames], tmp_path / "whole", fps=12, format=format_, metadata=TAGS)
    cut = write_media(iter(moving_frames.split(sizes)), tmp_path / "cut", fps=12, format=format_, metadata=TAGS)
    names = [path.relative_to(whole) for path in whole.rglob("*")] or [Path()]
    assert len(names) == (9 if format_ == "png" else 1)
    assert all((cut / name).read_bytes() == (whole / name).read_bytes() for name in names)


@pytest.mark.parametrize(("format_", "function"), [("mp4", "_yuv_frame"), ("png", "png_bytes")])
def test_a_piece_is_written_and_forgotten_before_the_next_is_asked_for(
    tmp_path,
    moving_frames,
    monkeypatch,
    format_,
    function,
):
    written: list[int] = []
    alive: list[weakref.ref[np.ndarray]] = []
    write_frame = getattr(write, function)

    def watched(*arguments: object) -> object:
        written.append(1)
        return write_frame(*arguments)

    def pieces() -> Iterator[torch.Tensor]:
        for index in range(3):
            assert len(written) == 3 * index
            assert not any(array() is not None for array in alive)
            # What shares the tensor's memory keeps the array.
            array = moving_frames[3 * index : 3 * index + 3].numpy().copy()
            alive.append(weakref.ref(array))
            piece = torch.from_numpy(array)
            del array
            yield piece
            del piece

    monkeypatch.setattr(write, function, watched)
    write_media(pieces(), tmp_path / "a", fps=12, format=format_)
    assert len(written) == 9


@pytest.mark.parametrize(
    ("format_", "error"),
    [
        ("mp4", OSError(errno.EIO, "cannot read")),
        ("mp4", KeyboardInterrupt()),
        ("gif", ValueError("a bug")),
        ("png", av.error.InvalidDataError(1, "broken")),
    ],
    ids=repr,
)
def test_a_piece_that_cannot_be_made_leaves_the_old_file_and_its_error_is_raised(
    tmp_path, moving_frames, format_, error
):
    def pieces() -> Iterator[torch.Tensor]:
        yield moving_frames[:5]
        raise error

    with pytest.raises(type(error)) as caught:
        write_media(pieces(), tmp_path / "a", fps=12, format=format_)
    assert caught.value is error
    assert os.listdir(tmp_path) == []
    target = write_media([moving_frames], tmp_path / "a", fps=12, format=format_, metadata=TAGS)
    with pytest.raises(type(error)):
        write_media(pieces(), tmp_path / "a", fps=12, format=format_)
    assert read_tags(target)["seed"] == "42"
    assert os.listdir(tmp_path) == ["a"]
