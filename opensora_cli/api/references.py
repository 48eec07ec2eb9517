"""References that a program holds in memory, as files for the engine."""

import hashlib
import os
from pathlib import Path

import av
import numpy as np
from PIL import Image

from opensora_cli.api.video import Video
from opensora_cli.core.exceptions import RequestError

_FPS = 24
"""Frame rate of an array."""


def reference_files(given: object, folder: Path) -> list[str]:
    """Return the files of references; those in memory are written to `folder` without loss.

    A reference is a path, a picture of PIL, a `Video` or an array; several are a list or tuple. Arrays are RGB of
    uint8, (H, W, 3) for a picture and (T, H, W, 3) for a video. Equal references have equal files. Raises RequestError
    for other arrays and objects.
    """
    references = given if isinstance(given, list | tuple) else [given]
    return [_file(reference, folder) for reference in references]


def _file(reference: object, folder: Path) -> str:
    if isinstance(reference, str | os.PathLike):
        return os.fspath(reference)
    if isinstance(reference, Image.Image):
        # Transparency and color profile are handled as in a file.
        path = folder / "picture.png"
        reference.save(path, icc_profile=reference.info.get("icc_profile"))
        return str(path.rename(_named(folder, path.read_bytes(), ".png")))
    fps = reference.fps if isinstance(reference, Video) else _FPS
    frames = np.ascontiguousarray(reference.frames if isinstance(reference, Video) else np.asarray(reference))
    if frames.dtype != np.uint8 or frames.ndim not in (3, 4) or frames.shape[-1] != 3 or not frames.size:
        described = f"{frames.dtype} {frames.shape}" if frames.ndim else type(reference).__name__
        raise RequestError(
            f"ref={described} is not a reference",
            hint="give a path, a PIL picture, a Video, or an array of uint8 (H, W, 3) or (T, H, W, 3)",
        )
    if frames.ndim == 3:
        return _file(Image.fromarray(frames), folder)
    path = _named(folder, frames.tobytes() + str((fps, frames.shape)).encode(), ".mkv")
    with av.open(str(path), "w") as container:
        track = container.add_stream("ffv1", rate=fps)
        track.height, track.width = frames.shape[1:3]
        track.pix_fmt = "bgr0"
        for frame in frames:
            container.mux(track.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(track.encode(None))
    return str(path)


def _named(folder: Path, content: bytes, ending: str) -> Path:
    return folder / f"{hashlib.sha256(content).hexdigest()[:16]}{ending}"
