"""Videos in containers (MP4, MKV, WebM, AVI, ...), through PyAV."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import av
import numpy as np
import torch
from av.sidedata.sidedata import SideDataContainer
from av.sidedata.sidedata import Type as SideDataType
from av.video.reformatter import Interpolation

from opensora_cli.core.exceptions import MediaError
from opensora_cli.media.frames import VideoSource

ONLY_VIDEOS = {
    "format_whitelist": "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,ogg,asf,ivf,mxf,h264,hevc,m4v,obu,av1"
}
"""Options for opening a file: FFmpeg would also open playlists, which name other files, and plain text as a drawing."""

# Phone pictures look like MP4 from outside, and FFmpeg would return one tile of them.
_PICTURE_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1", b"avif"}

EXACT_COLOURS = (
    Interpolation.AREA
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.FULL_CHR_H_INP
    | Interpolation.ACCURATE_RND
    | Interpolation.BITEXACT
)
"""How colours are converted, in both directions: without it every round trip darkens a picture by one level, and the
result depends on the processor."""

_FALLBACK_FPS = 24.0


@contextmanager
def open_video(path: Path) -> Iterator[VideoSource]:
    """Open a video file.

    Raises:
        MediaError: broken, not a video, or without a picture track; also while its frames are read.
    """
    with path.open("rb") as stream:
        start = stream.read(12)
    if start[4:8] == b"ftyp" and start[8:12] in _PICTURE_BRANDS:
        raise MediaError(f"{path} is a HEIF picture, which osora cannot read", hint="convert it to PNG or JPEG")
    try:
        # Absolute: FFmpeg takes a relative name such as `http:x` for an address.
        with av.open(str(path.absolute()), mode="r", options=ONLY_VIDEOS, metadata_errors="replace") as container:
            if not container.streams.video:
                raise MediaError(f"{path} has no picture track", hint="it may be a sound file: give a video")
            track = container.streams.video[0]
            track.thread_type = "AUTO"
            rate = float(track.average_rate or track.guessed_rate or _FALLBACK_FPS)
            decoded = enumerate(container.decode(track))
            frames = (
                _ContainerFrame(frame, usual_time=index / rate, usual_duration=1 / rate) for index, frame in decoded
            )
            yield VideoSource(frames=frames, fps=rate)
    except av.FFmpegError as error:
        raise MediaError(f"{path} cannot be read as a picture or a video: {error.strerror}") from error


@dataclass(frozen=True)
class _ContainerFrame:
    decoded: av.VideoFrame
    usual_time: float
    usual_duration: float

    @property
    def time(self) -> float:
        return self.usual_time if self.decoded.pts is None else self.decoded.time

    @property
    def duration(self) -> float:
        length, time_base = self.decoded.duration, self.decoded.time_base
        return float(length * time_base) if length and time_base else self.usual_duration

    def to_rgb(self) -> torch.Tensor:
        rgb = self.decoded.reformat(format="rgb24", interpolation=EXACT_COLOURS)
        return torch.from_numpy(np.ascontiguousarray(_upright(rgb.to_ndarray(), self.decoded)))


def _upright(picture_HWC: np.ndarray, frame: av.VideoFrame) -> np.ndarray:
    """Turn and mirror a frame as its display matrix says, in quarter turns: how phones store what they film upright."""
    side_data = cast(SideDataContainer, frame.side_data)  # PyAV's stubs know one kind of it only
    if SideDataType.DISPLAYMATRIX not in side_data:
        return picture_HWC
    matrix = bytes(side_data[SideDataType.DISPLAYMATRIX])
    # Row vectors: (x', y') = (x, y) [[a, b], [c, d]], in 16.16 fixed point, each row of three entries.
    a, b, _, c, d = np.frombuffer(matrix, dtype=np.int32, count=5).tolist()
    quarter_turned = abs(b) > abs(a)
    if quarter_turned:
        picture_HWC = picture_HWC.transpose(1, 0, 2)
    flip_x, flip_y = (c < 0, b < 0) if quarter_turned else (a < 0, d < 0)
    return picture_HWC[:: -1 if flip_y else 1, :: -1 if flip_x else 1]
