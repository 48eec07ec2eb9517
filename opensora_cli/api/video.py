"""A video that was made, as a program and a notebook have it."""

import base64
import importlib
import os
import sys
import tempfile
import webbrowser
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.media_choices import MediaFormat
from opensora_cli.engine.generate.decode import Figures
from opensora_cli.engine.generate.held import HeldVideo
from opensora_cli.media.write import write_media
from opensora_cli.settings.explain import explain
from opensora_cli.settings.generate import GenerateSettings

_SMALL = 128
"""Pixels of the longer side up to which a notebook shows a video at twice its size."""


class Video:
    """One video in memory; nothing is on disk until it is saved.

    A notebook plays it where it is the value of a cell.
    """

    def __init__(self, held: HeldVideo) -> None:
        self._held = held

    @property
    def frames(self) -> NDArray[np.uint8]:
        """The frames (T, H, W, 3), RGB; not writable."""
        frames: NDArray[np.uint8] = self._held.frames_THWC.numpy().view()
        frames.flags.writeable = False
        return frames

    @property
    def fps(self) -> int:
        """Frames a second."""
        return self._held.plan.settings.video.fps

    @property
    def seed(self) -> int:
        """Of its noise."""
        return self._held.sample.seed

    @property
    def settings(self) -> GenerateSettings:
        """All settings that make this video again."""
        return self._held.settings

    @property
    def report(self) -> Figures:
        """Seconds of each stage, the most memory that was in use, and the PSNR of given frames."""
        return self._held.figures

    def save(self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> Path:
        """Write the video and its sidecar, byte for byte as `osora generate --out PATH` writes them; return where.

        Args:
            path: a file, or a folder in which it is named by prompt and seed; None: that of the settings, `samples`.
            overwrite: whether a file that is there gives way. What the same request has made is kept either way.

        Raises:
            RequestError: the ending of `path` is of no known format.
            OutputError: the file is there from another request, or cannot be written.
        """
        try:
            return self._held.save(path, overwrite=overwrite).path
        except ValidationError as error:
            raise RequestError("\n".join(explain(error))) from error

    def show(self) -> None:
        """Play the video: in the output of a notebook's cell, else in the browser, from a temporary file.

        Raises:
            HardwareError: there is no browser.
        """
        if _is_notebook():
            importlib.import_module("IPython.display").display(self)
            return
        folder = Path(tempfile.mkdtemp(prefix="osora-show-"))
        if not webbrowser.open(self._write(folder).as_uri()):
            raise HardwareError("there is no browser to show a video in", hint="write it with .save(path)")

    def __repr__(self) -> str:
        frames, height, width, _ = self._held.frames_THWC.shape
        prompt = self._held.plan.settings.prompt
        return f"<Video {prompt!r}: {width}x{height}, {frames} frames at {self.fps} fps, seed {self.seed}>"

    def _repr_html_(self) -> str:
        with tempfile.TemporaryDirectory(prefix="osora-show-") as folder:
            path = self._write(Path(folder))
            data = base64.b64encode(path.read_bytes()).decode()
        _, height, width, _ = self._held.frames_THWC.shape
        size = f'width="{2 * width}" ' if max(height, width) <= _SMALL else ""
        if path.suffix == ".mp4":
            return f'<video controls autoplay loop muted {size}src="data:video/mp4;base64,{data}"></video>'
        return f'<img {size}src="data:image/{path.suffix[1:]};base64,{data}">'

    def _write(self, folder: Path) -> Path:
        """Write what a browser shows; H.264 has even sizes alone."""
        frames_THWC = self._held.frames_THWC
        count, height, width, _ = frames_THWC.shape
        kind = MediaFormat.PNG if count == 1 else MediaFormat.WEBP if height % 2 or width % 2 else MediaFormat.MP4
        return write_media([frames_THWC], folder / f"video.{kind}", fps=self.fps, format=kind)


def _is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")
