"""Read pictures and videos, recognized by their content, never by their name."""

import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import torch

from opensora_cli.core.exceptions import FileProblem, MediaError
from opensora_cli.core.formatting import shown_path
from opensora_cli.core.reading import reading
from opensora_cli.media import containers, pictures
from opensora_cli.media.containers import MediaFacts, StoredFrame
from opensora_cli.media.results import readable_file

_VIDEOS = {
    *(".mp4", ".m4v", ".mov", ".qt", ".3gp", ".3g2", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".mpe", ".m2v", ".ts"),
    *(".mts", ".m2ts", ".vob", ".flv", ".f4v", ".ogv", ".wmv", ".asf", ".mxf", ".gif"),
}
_PICTURES = {
    *(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".avif", ".bmp", ".dib", ".tif", ".tiff", ".jp2"),
    *(".j2k", ".ppm", ".pgm", ".pbm", ".heic", ".heif", ".hif"),
}
"""Endings of pictures. HEIC is not read: naming it tells its owner."""

_MOST_RESAMPLED = 10_000_000
"""Limit of frames at another rate: 115 hours at 24 a second."""


@dataclass(frozen=True)
class VideoClip:
    """Frames of a video, uint8 RGB (T, H, W, 3), and their rate."""

    frames_THWC: torch.Tensor
    fps: float


def media_files(folder: Path) -> list[Path]:
    """Return the pictures and videos below a folder, by their endings, as absolute paths in order.

    Names that begin with a dot are skipped. Raises FileProblem if `folder` is not a folder, it or a folder in it cannot
    be read, or it has no pictures and videos.
    """
    with reading(folder):
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise FileProblem(f"{shown_path(folder)} is not a folder")

    def refuse(error: OSError) -> None:
        raise FileProblem(f"{shown_path(Path(os.fsdecode(error.filename)))} cannot be read: {error.strerror}")

    media: list[Path] = []
    for place, folders, names in os.walk(folder.absolute(), onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = sorted(name for name in names if not name.startswith("."))
        media += [Path(place, name) for name in names if os.path.splitext(name)[1].lower() in _VIDEOS | _PICTURES]
    if not media:
        raise FileProblem(f"{folder} has no pictures or videos", hint=f"it may hold {', '.join(sorted(_VIDEOS))} ...")
    return media


def is_picture(path: str | os.PathLike[str]) -> bool:
    """Return True for a still picture, False for a video or an animated picture. Raises MediaError for other files."""
    return pictures.num_pictures(readable_file(path)) == 1


def read_picture(path: str | os.PathLike[str]) -> torch.Tensor:
    """Return a picture, or the first frame of an animated one, as uint8 RGB (H, W, 3).

    The orientation that a camera noted is applied. Transparent parts become white, and sixteen bits eight. Raises
    MediaError if the file cannot be read.
    """
    file = readable_file(path)
    if pictures.num_pictures(file) == 0:
        raise MediaError(f"{file} is not a picture", hint="give a PNG, JPEG, WebP or another common picture format")
    return pictures.read_first(file)


def read_video(
    path: str | os.PathLike[str], *, num_frames: int | None = None, from_end: bool = False, fps: float | None = None
) -> VideoClip:
    """Return frames of a video, or of an animated GIF, WebP or PNG, upright.

    The file is read as a stream, so that only the requested frames are held.

    Args:
        num_frames: Number of frames; None for all.
        from_end: Whether to return the last frames instead of the first.
        fps: Constant rate to resample to, from the first frame on. A faster video loses frames and a slower one repeats
            them. None returns the frames as stored, with their mean rate.

    Raises:
        MediaError: The file is missing, empty, broken, a still picture, without a picture track, or shorter than
            `num_frames`.
    """
    file = readable_file(path)
    num_pictures = pictures.num_pictures(file)
    if num_pictures == 1:
        raise MediaError(f"{file} is a picture, not a video", hint="give a video, or choose a mode for pictures")
    source = pictures.open_animation(file) if num_pictures else containers.open_video(file)
    with source as video:
        shown = video.frames if fps is None else _resampled(video.frames, fps, file)
        wanted: Iterable[StoredFrame]
        # Converted to RGB only afterwards: most frames in the queue are never used.
        wanted = deque(shown, maxlen=num_frames) if from_end else islice(shown, num_frames)
        rgb = [frame.to_rgb() for frame in wanted]
        own_fps = video.fps
    if not rgb:
        raise MediaError(f"{file} holds no video frame that can be read")
    if len(rgb) < (num_frames or 1):
        frames = "1 frame" if len(rgb) == 1 else f"{len(rgb)} frames"
        at_rate = "" if fps is None else f" at {fps:g} frames a second"
        raise MediaError(f"{file} has {frames}{at_rate}, but {num_frames} are needed", hint="give a longer video")
    return VideoClip(frames_THWC=torch.stack(rgb), fps=own_fps if fps is None else fps)


def probe(path: str | os.PathLike[str]) -> MediaFacts:
    """Read all of a picture or video, but decode only pictures. Raises MediaError if the file is broken."""
    file = readable_file(path)
    num_pictures = pictures.num_pictures(file)
    if num_pictures == 0:
        return containers.probe_video(file)
    height, width, _ = pictures.read_first(file).shape
    if num_pictures == 1:
        return MediaFacts(num_frames=1, height=height, width=width, fps=None)
    with pictures.open_animation(file) as animation:
        num_frames = sum(1 for _ in animation.frames)
        return MediaFacts(num_frames=num_frames, height=height, width=width, fps=animation.fps)


def read_cut(path: str | os.PathLike[str], *, start: int, num_frames: int, interval: int = 1) -> Iterator[torch.Tensor]:
    """Yield `num_frames` frames from `start`, every `interval`-th one, as uint8 (H, W, 3) of one size.

    Seeks as near to `start` as possible. Raises MediaError if the file is missing, broken, neither picture nor video,
    too short, or of several sizes.
    """
    file = readable_file(path)
    num_pictures = pictures.num_pictures(file)
    if num_pictures == 1:
        frames = iter([pictures.read_first(file)][start:])
        yield from _exactly(frames, num_frames, file)
        return
    source = pictures.open_animation(file) if num_pictures else containers.open_video(file, start=start, threads=1)
    with source as video:
        from_start = islice(video.frames, start, None) if num_pictures else video.frames
        wanted = islice(from_start, 0, (num_frames - 1) * interval + 1, interval)
        yield from _exactly((frame.to_rgb() for frame in wanted), num_frames, file)


def _exactly(frames: Iterator[torch.Tensor], num_frames: int, file: Path) -> Iterator[torch.Tensor]:
    found, size = 0, None
    for frame in frames:
        size = size or frame.shape
        if frame.shape != size:
            raise MediaError(f"{file} changes its size within the frames that were to be read")
        found += 1
        yield frame
    if found < num_frames:
        raise MediaError(f"{file} ends after {found} of {num_frames} frames that were to be read")


def _resampled(frames: Iterable[StoredFrame], fps: float, file: Path) -> Iterator[StoredFrame]:
    """Yield the frame shown at 0, 1/fps, 2/fps ... seconds after the first. A file may claim any time."""
    # Times in files are rounded: a frame a thousandth of a step later counts.
    tolerance = 1e-3 / fps
    shown: StoredFrame | None = None
    start, count = 0.0, 0
    for frame in chain(frames, [None]):
        if shown is not None:
            end = (shown.time + shown.duration if frame is None else frame.time) - start
            if end * fps > _MOST_RESAMPLED:
                raise MediaError(
                    f"{file} shows a frame {end:.3g} s after its first, which is over {_MOST_RESAMPLED:,} frames at "
                    f"{fps:g} a second",
                    hint="encode it again, or use it at its own rate",
                )
            while count / fps < end - tolerance:
                yield shown
                count += 1
        elif frame is not None:
            start = frame.time
        shown = frame
