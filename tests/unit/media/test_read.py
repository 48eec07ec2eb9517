"""Pictures and videos of every kind that people have, and what is said about those that cannot be read."""

import io
import struct
import tracemalloc
import zlib
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hostile_files import animated_gif, cut_in_tenths, picture_bombs
from PIL import Image

from opensora_cli.core.exceptions import MediaError
from opensora_cli.media import pictures
from opensora_cli.media.read import is_picture, probe, read_cut, read_picture, read_video
from opensora_cli.media.write import write_media


def red_left_green_top(height: int = 32, width: int = 48) -> torch.Tensor:
    """(H, W, 3) uint8: black, with a red left quarter and a green top quarter."""
    picture = torch.zeros(height, width, 3, dtype=torch.uint8)
    picture[:, : width // 4, 0] = 255
    picture[: height // 4, :, 1] = 255
    return picture


def write_video(
    path: Path, frames_THWC: torch.Tensor, times: list[int] | None = None, *, degrees: float | None = None
) -> Path:
    """Write an MP4 or MKV whose frames appear at `times` tenths of a second."""
    with av.open(str(path), "w") as container:
        track = container.add_stream("libx264", rate=10, options={"crf": "10"})
        track.height, track.width = frames_THWC.shape[1:3]
        track.pix_fmt = "yuv420p"
        if degrees is not None:
            track.set_display_rotation(degrees)
        for index, pixels in enumerate(frames_THWC):
            frame = av.VideoFrame.from_ndarray(pixels.numpy(), format="rgb24")
            frame.pts, frame.time_base = (times[index] if times else index), Fraction(1, 10)
            container.mux(track.encode(frame))
        container.mux(track.encode(None))
    return path


def numbered(count: int, *, height: int = 32, width: int = 32) -> torch.Tensor:
    """Frame k is grey of level 10 k."""
    return (torch.arange(count, dtype=torch.uint8) * 10).view(-1, 1, 1, 1).expand(count, height, width, 3).clone()


def levels(frames_THWC: torch.Tensor) -> list[int]:
    return [round(value / 10) for value in frames_THWC.float().mean(dim=(1, 2, 3)).tolist()]


class TestPictures:
    @pytest.mark.parametrize("ending", ["png", "webp", "bmp", "tiff", "gif", "jpg", "jp2"])
    def test_formats(self, tmp_path, ending):
        path = tmp_path / f"a.{ending}"
        Image.fromarray(red_left_green_top().numpy()).save(path, quality=95)
        picture = read_picture(path)
        assert picture.dtype == torch.uint8
        assert picture.shape == (32, 48, 3)
        assert (picture.float() - red_left_green_top().float()).abs().mean() < 12
        assert is_picture(path)

    def test_the_content_counts_and_not_the_name(self, tmp_path):
        Image.fromarray(red_left_green_top().numpy()).save(tmp_path / "a.mp4", format="PNG")
        write_video(tmp_path / "b.mp4", numbered(3)).rename(tmp_path / "b.png")
        assert is_picture(tmp_path / "a.mp4")
        assert not is_picture(tmp_path / "b.png")
        assert torch.equal(read_picture(tmp_path / "a.mp4"), red_left_green_top())
        assert levels(read_video(tmp_path / "b.png").frames_THWC) == [0, 1, 2]

    @pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
    def test_every_colour_mode_becomes_rgb(self, tmp_path, mode):
        grey = Image.new("RGB", (8, 8), (255, 255, 255))
        path = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
        grey.convert(mode).save(path)
        assert read_picture(path).tolist() == [[[255, 255, 255]] * 8] * 8

    def test_sixteen_bits_of_colour_become_eight(self, tmp_path):
        def chunk(name: bytes, content: bytes) -> bytes:
            return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

        pixels = struct.pack(">B3H", 0, 65535, 32896, 0)
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))
        body = chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
        (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + body)
        assert read_picture(tmp_path / "a.png")[0, 0].tolist() == [255, 128, 0]


class TestVideos:
    @pytest.mark.parametrize("format_", ["gif", "webp"])
    def test_animated_pictures_are_videos(self, tmp_path, format_):
        path = tmp_path / f"a.{format_}"
        first, *others = (Image.fromarray(frame.numpy()) for frame in numbered(12))
        first.save(path, save_all=True, append_images=others, duration=80)
        assert not is_picture(path)
        clip = read_video(path, num_frames=3, from_end=True)
        assert levels(clip.frames_THWC) == [9, 10, 11]
        assert clip.fps == 12.5

    @pytest.mark.parametrize("quarter_turns", [1, 2, 3])
    def test_phone_videos_are_turned_upright(self, tmp_path, quarter_turns):
        stored = red_left_green_top().expand(3, -1, -1, -1)
        path = write_video(tmp_path / "a.mp4", stored, degrees=90.0 * quarter_turns)
        upright = red_left_green_top().rot90(quarter_turns, dims=(0, 1))
        frames = read_video(path).frames_THWC
        assert frames.shape[1:] == upright.shape
        assert (frames[1].float() - upright.float()).abs().mean() < 12

    def test_only_the_frames_asked_for_are_held(self, tmp_path):
        frames = numbered(25, height=64, width=64).repeat(8, 1, 1, 1)
        path = write_video(tmp_path / "a.mp4", frames)
        animation = write_media([frames], tmp_path / "a.gif", fps=9, format="gif")
        for file in (path, animation):
            for from_end in (False, True):
                tracemalloc.start()
                clip = read_video(file, num_frames=2, from_end=from_end)
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert len(clip.frames_THWC) == 2
                assert peak < frames.nbytes / 2, (file, from_end)


class TestProblems:
    """Each is one line that names the file."""

    @staticmethod
    def one_line(error: MediaError, path: Path) -> str:
        assert str(path) in error.message
        assert "\n" not in error.message
        return error.message

    @pytest.mark.parametrize("read", [is_picture, read_picture, read_video])
    def test_missing_empty_folder(self, tmp_path, read):
        assert callable(read)
        (tmp_path / "empty.png").touch()
        for name, cause in {"missing.png": "does not exist", "empty.png": "is empty", ".": "it is a folder"}.items():
            with pytest.raises(MediaError, match=cause) as caught:
                read(tmp_path / name)
            self.one_line(caught.value, tmp_path / name)

    def test_an_animation_of_too_many_pixels_in_all_is_refused(self, tmp_path, monkeypatch):
        path = write_media([numbered(4)], tmp_path / "a.gif", fps=9, format="gif")
        monkeypatch.setattr(pictures, "_MOST_PIXELS", 4 * 32 * 32 - 1)
        with pytest.raises(MediaError, match="has 4 frames of 32 x 32 pixels, and at most 4,095 pixels") as caught:
            read_video(path, num_frames=1)
        assert self.one_line(caught.value, path)
        monkeypatch.setattr(pictures, "_MOST_PIXELS", 4 * 32 * 32)
        assert len(read_video(path).frames_THWC) == 4

    @pytest.mark.parametrize("from_end", [False, True])
    def test_too_short_says_how_many_there_are(self, tmp_path, from_end):
        path = write_video(tmp_path / "a.mp4", numbered(5))
        with pytest.raises(MediaError, match="has 5 frames, but 33 are needed") as caught:
            read_video(path, num_frames=33, from_end=from_end)
        assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("part.mkv", {}),
        ("part.mp4", {}),
        ("fragments.mp4", {"movflags": "frag_keyframe+empty_moov"}),
    ],
)
def test_frames_that_a_cut_has_left_without_those_they_need_are_skipped(tmp_path, name, settings):
    whole, part = tmp_path / "whole.mp4", tmp_path / name
    options = {"x264-params": "open-gop=1:keyint=12:min-keyint=12:bframes=3:scenecut=0:b-adapt=0"}
    with av.open(str(whole), "w") as target:
        track = target.add_stream("libx264", rate=24, options=options)
        track.width = track.height = 96
        for number in range(40):
            levels = np.random.default_rng(number).integers(256, size=(96, 96, 3), dtype=np.uint8)
            target.mux(track.encode(av.VideoFrame.from_ndarray(levels, format="rgb24")))
        target.mux(track.encode())
    with av.open(str(whole)) as source, av.open(str(part), "w", options=settings) as target:
        track = target.add_stream_from_template(source.streams.video[0])
        packets = [packet for packet in source.demux(video=0) if packet.dts is not None]
        second = [number for number, packet in enumerate(packets) if packet.is_keyframe][1]
        for packet in packets[second:]:
            packet.stream = track
            target.mux(packet)
    assert probe(part).num_frames == len(read_video(part).frames_THWC) == 28
    assert len(list(read_cut(part, start=20, num_frames=8))) == 8
    with pytest.raises(MediaError, match="ends after 7 of 8 frames"):
        list(read_cut(part, start=21, num_frames=8))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "animated GIF", "MP4", "MKV"])
def test_what_is_cut_at_any_tenth_is_read_or_refused_in_a_line(tmp_path, kind):
    path = tmp_path / "clip"
    levels = np.random.default_rng(0).integers(256, size=(40, 48, 3), dtype=np.uint8)
    if kind in ("MP4", "MKV"):
        frames = torch.from_numpy(np.stack([np.roll(levels, shift, 0) for shift in range(12)]))
        whole = write_video(tmp_path / f"whole.{kind.lower()}", frames).read_bytes()
    elif kind == "animated GIF":
        whole = animated_gif()
    else:
        stream = io.BytesIO()
        Image.fromarray(levels).save(stream, kind)
        whole = stream.getvalue()
    refused: list[str] = []
    for part in cut_in_tenths(whole):
        path.write_bytes(part)
        for read in (is_picture, read_picture, read_video, probe):
            try:
                read(path)
            except MediaError as error:
                refused.append(error.message)
    assert len(refused) >= 10
    assert all(str(path) in message and message.isprintable() for message in refused)


def test_pictures_of_gigantic_sizes_are_refused_before_they_take_memory(tmp_path):
    for name, content in picture_bombs().items():
        path = tmp_path / name
        path.write_bytes(content)
        tracemalloc.start()
        with pytest.raises(MediaError) as caught:
            probe(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 80 * 2**20, name
        assert str(path) in caught.value.message, name
        assert caught.value.message.isprintable(), name
