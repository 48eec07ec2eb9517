"""Frames and pictures as players and viewers show them, by what files say beside their pixels."""

import io
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from av.stream import Disposition
from av.video.reformatter import ColorRange, Colorspace
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms, ImageOps

from opensora_cli.core.exceptions import MediaError
from opensora_cli.media import containers
from opensora_cli.media.read import probe, read_picture, read_video


def pattern(height: int = 64, width: int = 64) -> NDArray[np.uint8]:
    """A gray (H, W, 3) picture with a white square in its upper left quarter."""
    picture = np.full((height, width, 3), 90, dtype=np.uint8)
    picture[height // 8 : height // 4, width // 8 : width // 4] = 255
    return picture


def write_tracks(path: Path, *tracks: NDArray[np.uint8], aspect: Fraction | None = None, **flags: Any) -> Path:
    """Write one H.264 track of three equal frames for each picture; `flags` are dispositions by track number."""
    with av.open(str(path), "w") as container:
        streams = []
        for index, picture in enumerate(tracks):
            track = container.add_stream("libx264", rate=10, options={"crf": "10"})
            track.height, track.width = picture.shape[:2]
            track.pix_fmt = "yuv420p"
            track.disposition = flags.get(f"track{index}", Disposition(0))
            if aspect is not None:
                track.codec_context.sample_aspect_ratio = aspect
            streams.append(track)
        for track, picture in zip(streams, tracks, strict=True):
            for _ in range(3):
                container.mux(track.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(track.encode(None))
    return path


def box(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), name) + content


class TestShapeOfPixels:
    @pytest.mark.parametrize(("aspect", "size"), [((2, 1), (64, 128)), ((1, 2), (128, 64)), ((10, 11), (70, 64))])
    def test_pixels_become_square(self, tmp_path, aspect, size):
        path = write_tracks(tmp_path / "a.mp4", pattern(), aspect=Fraction(*aspect))
        facts = probe(path)
        frame = read_video(path).frames_THWC[0]
        assert (facts.height, facts.width) == frame.shape[:2] == size
        expected = torch.from_numpy(np.array(Image.fromarray(pattern()).resize(size[::-1]))).float()
        assert (frame.float() - expected).abs().mean() < 3

    def test_limit_of_pixels_counts_the_stretched_frame(self, tmp_path, monkeypatch):
        monkeypatch.setattr(containers, "_MOST_PIXELS", 64 * 128)
        assert probe(write_tracks(tmp_path / "a.mp4", pattern(), aspect=Fraction(2))).width == 128
        with pytest.raises(MediaError, match="has frames of 64 x 64 pixels, and at most 2,730 are read"):
            probe(write_tracks(tmp_path / "b.mp4", pattern(), aspect=Fraction(3)))


class TestTracks:
    def test_cover_is_not_the_video(self, tmp_path):
        path = write_tracks(tmp_path / "a.mp4", pattern())
        path.write_bytes(with_cover(path.read_bytes()))
        assert probe(path).num_frames == 3
        assert read_video(path).frames_THWC.shape == (3, 64, 64, 3)

    def test_sound_with_a_cover_has_no_pictures(self, tmp_path):
        path = tmp_path / "a.mp4"
        with av.open(str(path), "w") as container:
            track = container.add_stream("aac", rate=8000)
            sound = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
            sound.sample_rate = 8000
            container.mux(track.encode(sound))
            container.mux(track.encode(None))
        path.write_bytes(with_cover(path.read_bytes()))
        with pytest.raises(MediaError, match="has no picture track"):
            probe(path)

    def test_default_track_is_read(self, tmp_path):
        small, large = pattern(32, 32), pattern(64, 96)
        path = write_tracks(tmp_path / "a.mkv", small, large, track1=Disposition.default)
        assert read_video(path).frames_THWC.shape[1:3] == (64, 96)
        path = write_tracks(tmp_path / "b.mkv", small, large, track0=Disposition.default)
        assert read_video(path).frames_THWC.shape[1:3] == (32, 32)


def with_cover(file: bytes) -> bytes:
    """Return an MP4 file with a cover picture in front of its tracks."""
    stream = io.BytesIO()
    Image.new("RGB", (48, 48), (255, 0, 255)).save(stream, format="JPEG")
    data = box(b"data", struct.pack(">II", 13, 0) + stream.getvalue())
    handler = box(b"hdlr", b"\0" * 8 + b"mdirappl" + b"\0" * 9)
    cover = box(b"udta", box(b"meta", b"\0" * 4 + handler + box(b"ilst", box(b"covr", data))))
    at = file.index(b"moov") - 4  # The last box: no frame has another place.
    return file[:at] + box(b"moov", cover + file[at + 8 :])


class TestColors:
    BARS = np.array([[191, 191, 191], [191, 191, 0], [0, 191, 191], [0, 191, 0], [191, 0, 191], [191, 0, 0]], np.uint8)

    @pytest.mark.parametrize(("height", "width", "space"), [(720, 1280, "ITU709"), (480, 640, "ITU601")])
    def test_untagged_video_is_read_by_its_size(self, tmp_path, height, width, space):
        bars = np.repeat(np.repeat(self.BARS[None], height, 0), width // 6, 1)[:, : width - width % 6]
        bars = np.pad(bars, ((0, 0), (0, width - bars.shape[1]), (0, 0)))
        path = tmp_path / "a.mp4"
        with av.open(str(path), "w") as container:
            track = container.add_stream("libx264", rate=12, options={"crf": "8"})
            track.width, track.height, track.pix_fmt = width, height, "yuv420p"
            frame = av.VideoFrame.from_ndarray(bars, format="rgb24").reformat(
                format="yuv420p", dst_colorspace=Colorspace[space], dst_color_range=ColorRange.MPEG
            )
            frame.colorspace, frame.color_range = 2, 0
            container.mux(track.encode(frame))
            container.mux(track.encode(None))
        middles = [width // 12 + index * (width // 6) for index in range(6)]
        read = read_video(path).frames_THWC[0, height // 2, middles]
        assert read.float().numpy() == pytest.approx(self.BARS.astype(float), abs=4)

    @pytest.mark.parametrize(
        ("transfer", "levels"),
        [
            ("smpte2084", (0.36358, 0.58069, 0.75183)),
            pytest.param("arib-std-b67", (0.33936, 0.74991, 1.0), marks=pytest.mark.slow),
        ],
    )
    def test_hdr_keeps_white_and_order(self, tmp_path, transfer, levels):
        """Levels of the formulas of ITU-R BT.2100 for gray of 20 and 203 cd/m², and a highlight."""
        path = tmp_path / "a.mp4"
        with av.open(str(path), "w") as container:
            # With B-frames, a busy machine sometimes gives packets in an order that MP4 refuses.
            colors = f"colorprim=bt2020:transfer={transfer}:colormatrix=bt2020nc"
            options = {"x265-params": f"log-level=none:bframes=0:{colors}"}
            track = container.add_stream("libx265", rate=12, options=options)
            track.width = track.height = 64
            track.pix_fmt = "yuv420p10le"
            for index, level in enumerate(levels):
                frame = av.VideoFrame(64, 64, "yuv420p10le")
                frame.pts = index
                for plane, value in zip(frame.planes, (64 + round(level * 876), 512, 512), strict=True):
                    plane.update(np.full(plane.buffer_size // 2, value, "<u2").tobytes())
                container.mux(track.encode(frame))
            container.mux(track.encode(None))
        gray, white, highlight = read_video(path).frames_THWC.float().mean((1, 2, 3)).tolist()
        # 20 of 203 cd/m² is a tenth of the light: level 89 of sRGB.
        assert gray == pytest.approx(89, abs=3)
        assert 245 <= white < highlight <= 255

    @pytest.mark.parametrize("ending", ["png", "jpg", "tiff", "webp"])
    def test_color_profile_is_applied(self, tmp_path, ending):
        """A profile with the primaries of sRGB, of which red and blue are exchanged."""
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
        for old, new in ((b"rXYZ", b"____"), (b"bXYZ", b"rXYZ"), (b"____", b"bXYZ"), (b"s\0R\0G\0B", b"o\0t\0h\0e")):
            assert old in profile
            profile = profile.replace(old, new)
        Image.new("RGB", (8, 8), (60, 180, 90)).save(tmp_path / f"a.{ending}", icc_profile=profile, quality=100)
        read = read_picture(tmp_path / f"a.{ending}")
        assert read[4, 4].float().numpy() == pytest.approx([90, 180, 60], abs=4)

    @pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
    def test_transparent_parts_are_white(self, tmp_path, mode):
        """The colors under transparency are the rest of an editor's work."""
        path = tmp_path / "a.png"
        if mode == "RGB":
            Image.new("RGB", (2, 1), (10, 20, 30)).save(path, transparency=(10, 20, 30))
        else:
            Image.new("RGBA", (2, 1), (10, 20, 30, 0)).convert(mode).save(path)
        assert read_picture(path).tolist() == [[[255, 255, 255]] * 2]


@pytest.mark.parametrize("ending", ["jpg", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_once(tmp_path, ending, orientation):
    """Pillow applies the one of TIFF while it decodes."""
    picture = Image.fromarray(pattern(48, 80))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    picture.save(tmp_path / f"a.{ending}", exif=exif, quality=95)
    picture.getexif()[ExifTags.Base.Orientation] = orientation
    upright = np.asarray(ImageOps.exif_transpose(picture), dtype=float)
    read = read_picture(tmp_path / f"a.{ending}").numpy()
    assert read.shape == upright.shape
    assert np.abs(read - upright).mean() < 3


class TestAnimations:
    @pytest.mark.parametrize(("duration", "fps"), [(0, 10), (10, 10), (20, 50), (40, 25)])
    @pytest.mark.parametrize("ending", ["gif", "webp", "png"])
    def test_short_frames_last_as_long_as_in_browsers(self, tmp_path, ending, duration, fps):
        frames = [Image.new("RGB", (16, 16), (50 * index, 9, 9)) for index in range(4)]
        path = tmp_path / f"a.{ending}"
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=duration)
        assert read_video(path).fps == pytest.approx(fps)
