"""Videos in containers (MP4, MKV, WebM, AVI, ...), through PyAV."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import dropwhile, islice, pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import av
import numpy as np
import torch
from av.container import InputContainer
from av.stream import Disposition
from av.video.reformatter import ColorPrimaries, Colorspace, ColorTrc, Interpolation, VideoReformatter

from opensora_cli.core.exceptions import MediaError
from opensora_cli.core.reading import lack_of_machine

ONLY_VIDEOS = {
    "format_whitelist": "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,ogg,asf,ivf,mxf,h264,hevc,m4v,obu,av1"
}
"""Options for opening a file. FFmpeg would also open playlists, which name other files, and render plain text."""

EXACT_COLORS = (
    Interpolation.AREA
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.FULL_CHR_H_INP
    | Interpolation.ACCURATE_RND
    | Interpolation.BITEXACT
)
"""Flags of color conversions, in reading and writing. Without them, each round trip darkens a picture by one level, and
the result depends on the processor."""

# Pictures of phones look like MP4, and FFmpeg would return one of their tiles.
_PICTURE_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1", b"avif"}

_MOST_PIXELS = 2**28
"""Limit of square pixels in a frame: 16,384 x 16,384."""
_WIDEST_PIXEL = Fraction(8)
"""Largest width of a pixel divided by its height, or height by width; known formats have at most 2.2."""
_UNSPECIFIED_COLORS = 2
"""Code of an unknown color space (ITU-T H.273)."""
_HDR_TRANSFERS = (ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67)
"""Transfer functions of high dynamic range, PQ and HLG, which become that of sRGB."""
_FALLBACK_FPS = 24.0
_MOST_DRIFT = 0.25
"""Largest error of the mean rate at the wanted frame, in frames."""
_UNEVEN = 2.0
"""Longest frame, in usual frames, of a video at a constant rate. Some programs drop single frames."""
_MOST_REORDERED = 64
"""More packets than any codec stores between two consecutive frames."""

_Part = TypeVar("_Part")


ToRGB = Callable[[], torch.Tensor]
"""Function that returns a decoded frame as uint8 RGB (H, W, 3), upright."""


class VideoSource(NamedTuple):
    """Open video: frames, which are decoded on access, and mean rate."""

    frames: Iterator[ToRGB]
    fps: float


@contextmanager
def open_video(path: Path, *, start: int = 0, threads: int | None = None) -> Iterator[VideoSource]:
    """Open a video file at frame number `start`, from 0.

    If times are missing, or seeking fails, all frames before it are decoded and counted. `threads` decode; None for
    those of the machine. Raises MediaError, also while frames are read, if the file is broken or has no picture track.
    """
    if start:
        with _opened(path, threads=threads) as (container, track):
            frames = _frames_after_seeking(container, track, path, start=start, threads=threads)
            if frames is not None:
                yield VideoSource(frames=frames, fps=_mean_rate(track))
                return
    # Opened a second time: some files can be read only once.
    with _opened(path, threads=threads) as (container, track):
        frames = _shown(_whole_tracks(container.decode(track), path), track, threads=threads)
        yield VideoSource(frames=islice(frames, start, None), fps=_mean_rate(track))


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFacts:
    """Facts about a picture or video file."""

    num_frames: int
    height: int
    width: int
    """Width in pixels, upright, as is the height."""
    fps: float | None
    """Mean rate in frames per second; None for a picture."""
    is_uneven: bool = False
    """Whether some frames last much longer than others."""


def probe_video(path: Path) -> MediaFacts:
    """Read a video file to its end, decoding only the first frame. Raises MediaError if it is broken or cut off."""
    first: av.VideoFrame | None = None
    stored = 0
    with _opened(path, threads=1) as (container, track):

        def packets() -> "Iterator[av.Packet[av.VideoStream]]":
            nonlocal first, stored
            for packet in _whole_tracks(container.demux(track), path):
                if first is None:
                    first = next(iter(packet.decode()), None)
                stored += bool(packet.size)
                yield packet

        times = list(_shown_times(packets()))
        known = sorted(time for time in times if time is not None)
        durations = sorted(later - earlier for earlier, later in pairwise(known))
        if first is None:
            raise MediaError(f"{path} holds no video frame that can be read")
        if stored < track.frames:
            raise MediaError(f"{path} is cut off: it has {stored} of {track.frames} frames")
        size = _size(first, track.sample_aspect_ratio or Fraction(1))
        height, width = size[::-1] if _quarter_turns(first) % 2 else size
        return MediaFacts(
            num_frames=len(times),
            height=height,
            width=width,
            fps=_mean_rate(track),
            is_uneven=bool(durations) and durations[-1] > _UNEVEN * durations[len(durations) // 2],
        )


@contextmanager
def _opened(path: Path, *, threads: int | None) -> Iterator[tuple[InputContainer, av.VideoStream]]:
    with path.open("rb") as stream:
        start = stream.read(12)
    if start[4:8] == b"ftyp" and start[8:12] in _PICTURE_BRANDS:
        raise MediaError(f"{path} is a HEIF picture, which osora cannot read", hint="convert it to PNG or JPEG")
    try:
        # FFmpeg takes a relative name such as `http:x` for an address.
        with av.open(str(path.absolute()), mode="r", options=ONLY_VIDEOS, metadata_errors="replace") as container:
            # Players show the first track marked as default, else the first, and never a cover picture.
            videos = container.streams.video
            tracks = [track for track in videos if not track.disposition & Disposition.attached_pic]
            defaults = [track for track in tracks if track.disposition & Disposition.default]
            track = next(iter(defaults or tracks), None)
            if track is None:
                raise MediaError(f"{path} has no picture track", hint="it may be a sound file: give a video")
            if track.codec_context is None:  # This FFmpeg lacks the codec.
                raise MediaError(f"{path} is of a kind of video that cannot be decoded here")
            aspect = track.sample_aspect_ratio or Fraction(1)
            if not 1 / _WIDEST_PIXEL <= aspect <= _WIDEST_PIXEL:
                raise MediaError(
                    f"{path} says that its pixels are {aspect} times as wide as high", hint="encode it again"
                )
            # A few bytes may claim any size, in the container and in each frame, which is stretched afterwards.
            most_pixels = int(_MOST_PIXELS / max(aspect, 1 / aspect))
            if track.codec_context.width * track.codec_context.height > most_pixels:
                size = f"{track.codec_context.width} x {track.codec_context.height}"
                raise MediaError(f"{path} has frames of {size} pixels, and at most {most_pixels:,} are read")
            track.codec_context.options = {"max_pixels": str(most_pixels)}
            if threads is None:
                track.thread_type = "AUTO"
            else:
                track.codec_context.thread_count = threads
            yield container, track
    except av.FFmpegError as error:
        # A damaged file may claim more memory than there is.
        if not isinstance(error, MemoryError) and (lack := lack_of_machine(error, path)):
            raise lack from error
        raise MediaError(f"{path} cannot be read as a picture or a video: {error.strerror}") from error


def _whole_tracks(parts: Iterable[_Part], path: Path) -> Iterator[_Part]:
    """Yield packets or frames. PyAV raises IndexError for a track that begins in the middle of a damaged file."""
    try:
        yield from parts
    except IndexError as error:
        raise MediaError(f"{path} is broken: a track begins in its middle") from error


def _shown_times(packets: "Iterable[av.Packet[av.VideoStream]]") -> Iterator[int | None]:
    """Yield the times of the frames that players show, in the order of the file; None for an unknown time.

    A clip that was cut without encoding may begin with frames before its first keyframe, in the file or in time, which
    need earlier frames. Players and decoders skip them.
    """
    unsure: list[int | None] = []
    start: int | None = None
    has_key = False
    for packet in packets:
        if not packet.size or packet.is_discard:
            continue
        if not has_key and packet.is_keyframe:
            has_key, start = True, packet.pts
        if not has_key:
            unsure.append(packet.pts)
        elif start is None or packet.pts is None or packet.pts >= start:
            yield packet.pts
    if not has_key:
        yield from unsure


def _mean_rate(track: av.VideoStream) -> float:
    return float(track.average_rate or track.guessed_rate or _FALLBACK_FPS)


def _shown(decoded: Iterable[av.VideoFrame], track: av.VideoStream, *, threads: int | None) -> Iterator[ToRGB]:
    """Yield decoded frames. `threads` convert the colors."""
    aspect = track.sample_aspect_ratio or Fraction(1)
    reformatter = VideoReformatter()  # It keeps the tables of a conversion, which take seconds for HDR.
    for frame in decoded:
        yield partial(_rgb, reformatter, frame, aspect, threads)


def _frames_after_seeking(
    container: InputContainer, track: av.VideoStream, path: Path, *, start: int, threads: int | None
) -> Iterator[ToRGB] | None:
    """Return the frames from number `start` on; None if seeking fails."""
    wanted = _place_before(container, track, path, frame=start)
    if wanted is None:
        return None
    try:
        container.seek(int(wanted), stream=track)
    except av.FFmpegError:
        return None
    decoded = _whole_tracks(container.decode(track), path)
    first = next(decoded, None)
    if first is None or first.pts is None or first.pts > wanted:
        return None
    later = dropwhile(lambda frame: frame.pts is not None and frame.pts < wanted, decoded)
    return _shown(later, track, threads=threads)


def _place_before(container: InputContainer, track: av.VideoStream, path: Path, *, frame: int) -> float | None:
    """Return the time halfway between a frame, except the first, and the frame before it, in the track's units.

    None means that it is unknown. It follows from the rate if the container counts its frames, so that the rate was
    measured, and all frames are equally long. Otherwise the packets up to that frame are read, but not decoded.
    """
    if track.time_base is None or track.start_time is None:
        return None
    mean, usual = track.average_rate, track.base_rate
    if track.frames and mean and usual and abs(usual / mean - 1) * frame < _MOST_DRIFT:
        return float(track.start_time + (frame - Fraction(1, 2)) / mean / track.time_base)
    shown = islice(_shown_times(_whole_tracks(container.demux(track), path)), frame + _MOST_REORDERED)
    times = sorted(time for time in shown if time is not None)
    return None if frame >= len(times) else (times[frame - 1] + times[frame]) / 2


def _rgb(reformatter: VideoReformatter, frame: av.VideoFrame, aspect: Fraction, threads: int | None) -> torch.Tensor:
    """Return a frame upright, with square pixels, and in the colors of sRGB; `aspect` is that of its pixels."""
    height, width = _size(frame, aspect)
    is_hdr = frame.color_trc in _HDR_TRANSFERS
    # Players assume BT.709 for a large frame that names no color space, and BT.601 for a small one.
    is_untagged_hd = frame.colorspace == _UNSPECIFIED_COLORS and (frame.width >= 1280 or frame.height > 576)
    rgb = reformatter.reformat(
        frame,
        width=width,
        height=height,
        format="rgb24",
        src_colorspace=Colorspace.ITU709 if is_untagged_hd else None,
        dst_color_trc=ColorTrc.IEC61966_2_1 if is_hdr else None,
        dst_color_primaries=ColorPrimaries.BT709 if is_hdr else None,
        interpolation=EXACT_COLORS,
        threads=threads,
    ).to_ndarray()
    return torch.from_numpy(np.ascontiguousarray(np.rot90(rgb, _quarter_turns(frame))))


def _size(frame: av.VideoFrame, aspect: Fraction) -> tuple[int, int]:
    """Return the height and width with square pixels. The shorter side is stretched, so that no detail is lost."""
    return round(frame.height * max(1 / aspect, Fraction(1))), round(frame.width * max(aspect, Fraction(1)))


def _quarter_turns(frame: av.VideoFrame) -> int:
    """Return the turns to the left that make a frame upright, as phones store it."""
    return round(frame.rotation / 90)
