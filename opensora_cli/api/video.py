"""Finished videos in Python programs and notebooks."""

import base64
import importlib
import os
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.generate.decode import Figures, HeldVideo, write_video
from opensora_cli.engine.generate.outputs import check_outputs, find_target
from opensora_cli.engine.generate.plan import VIDEO
from opensora_cli.engine.generate.request import replaced
from opensora_cli.engine.generate.sample import remove_latents
from opensora_cli.engine.generate.sidecar import sample_settings
from opensora_cli.media.write import write_media
from opensora_cli.settings.generate import GenerateSettings

_SMALL = 128
"""Longest side, in pixels, of a video that a notebook shows at twice its size."""


class Video:
    """Video in memory. Nothing is on disk until `save`; a notebook plays it as the value of a cell."""

    frames: Final[NDArray[np.uint8]]
    """Frames (T, H, W, 3), RGB, read-only."""
    fps: Final[int]
    """Frames per second."""
    seed: Final[int]
    """Seed of the noise."""
    settings: Final[GenerateSettings]
    """All settings that make this video again."""
    report: Final[Figures]
    """Seconds of each stage, peak memory, and PSNR of frames that references give."""

    def __init__(self, held: HeldVideo, request_sha256: Callable[[int, str], str]) -> None:
        self._held, self._request_sha256 = held, request_sha256
        self.frames = held.frames_THWC.numpy().view()
        self.frames.flags.writeable = False
        self.fps = held.chain.settings.video.fps
        self.seed = held.files.seed
        self.settings = sample_settings(held.chain.video, held.files)
        self.report = held.figures

    def save(self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> Path:
        """Write the video and its sidecar as `osora generate --out PATH` does, and return the path of the video.

        Args:
            path: file, or folder in which prompt and seed name the file. None: path of the settings, `samples`.
            overwrite: replace a file of another request. A file of the same request is kept.

        Raises:
            RequestError: the ending of `path` names no known format.
            OutputError: the file exists from another request, or cannot be written.
        """
        held, start = self._held, time.perf_counter()
        changes: dict[str, object] = {"output.overwrite": overwrite or held.chain.settings.output.overwrite}
        if path is not None:
            changes["output.path"] = os.fspath(path)
        settings = replaced(held.chain.settings, changes)
        chain = held.chain.change(lambda plan: replace(plan, settings=settings), only=VIDEO)

        def figures() -> Figures:
            return held.figures.with_saving(time.perf_counter() - start)

        with ExitStack() as claims:
            check_outputs(chain, create=True)
            request = self._request_sha256(settings.sampling.seed, settings.output_format)
            sample = find_target(settings, 0, request, claims=claims)
            if not sample.made_before:
                write_video([held.frames_THWC], chain, sample, figures)
                if sample.saved is not None and sample.latents is not None:
                    # Latents of an interrupted run of the same request.
                    remove_latents(sample.latents)
        return sample.media

    def show(self) -> None:
        """Play the video in the output of a notebook's cell, else in the browser.

        Raises:
            HardwareError: no browser was found.
        """
        shell = sys.modules.get("IPython")
        if shell is not None and hasattr(shell.get_ipython(), "kernel"):
            importlib.import_module("IPython.display").display(self)
            return
        folder = Path(tempfile.mkdtemp(prefix="osora-show-"))
        if not webbrowser.open(self._write(folder).as_uri()):
            raise HardwareError("there is no browser to show a video in", hint="write it with .save(path)")

    def __repr__(self) -> str:
        frames, height, width, _ = self.frames.shape
        prompt = self._held.chain.settings.prompt
        return f"<Video {prompt!r}: {width}x{height}, {frames} frames at {self.fps} fps, seed {self.seed}>"

    def _repr_html_(self) -> str:
        with tempfile.TemporaryDirectory(prefix="osora-show-") as folder:
            path = self._write(Path(folder))
            data = base64.b64encode(path.read_bytes()).decode()
        _, height, width, _ = self.frames.shape
        size = f'width="{2 * width}" ' if max(height, width) <= _SMALL else ""
        if path.suffix == ".mp4":
            return f'<video controls autoplay loop muted {size}src="data:video/mp4;base64,{data}"></video>'
        return f'<img {size}src="data:image/{path.suffix[1:]};base64,{data}">'

    def _write(self, folder: Path) -> Path:
        """Write a file that a browser plays; H.264 needs even sizes."""
        frames_THWC = self._held.frames_THWC
        count, height, width, _ = frames_THWC.shape
        kind = MediaFormat.WEBP if height % 2 or width % 2 else MediaFormat.MP4
        if count == 1:
            kind = MediaFormat.PNG
        return write_media([frames_THWC], folder / f"video.{kind}", fps=self.fps, format=kind)
