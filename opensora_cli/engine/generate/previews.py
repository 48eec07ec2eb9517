"""Previews: the predicted video while it is denoised, as a GIF beside it."""

from collections.abc import Callable
from typing import TypeVar

import torch

from opensora_cli.core.exceptions import OsoraError
from opensora_cli.core.media_choices import MediaFormat
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.preview_map import PreviewMap
from opensora_cli.engine.generate.stages import RunRecord
from opensora_cli.engine.generate.targets import SampleFiles, preview_path
from opensora_cli.media.sheets import enlarged
from opensora_cli.media.write import write_media

T = TypeVar("T")

_GIF_SIDE = 256
"""Pixels of the longer side, at most, unless there are more latents."""


class Previews:
    """Writes previews after every few steps, as `output.preview_every` asks for, and at the end of exploring.

    A failure is a warning once, and ends no run.
    """

    def __init__(self, plan: ExecutionPlan, map_: PreviewMap, record: RunRecord) -> None:
        self._plan, self._map, self._record = plan, map_, record
        self._failed: set[str] = set()

    def step(self, sample: SampleFiles, steps: int, predicted_CTHW: Callable[[], torch.Tensor]) -> None:
        """Write the predicted video of a sample after so many steps, if a preview is due."""
        settings = self._plan.settings
        every = settings.output.preview_every
        ends_exploring = settings.output.explore and steps == settings.sampling.stop_at
        if not ends_exploring and (every is None or steps % every):
            return
        frames_THWC = self._tried("made", lambda: self._map.frames(predicted_CTHW()))
        if frames_THWC is None:
            return
        self._tried("written", lambda: self._write(frames_THWC, sample))

    def _write(self, frames_THWC: torch.Tensor, sample: SampleFiles) -> None:
        settings = self._plan.settings
        fps = settings.video.fps / settings.vae.grid.time_compression_ratio
        path = preview_path(sample.target)
        write_media([enlarged(frames_THWC, longest_side=_GIF_SIDE)], path, fps=fps, format=MediaFormat.GIF)

    def _tried(self, what: str, action: Callable[[], T]) -> T | None:
        if what in self._failed:
            return None
        try:
            return action()
        except (OsoraError, OSError, RuntimeError, ValueError) as error:
            self._failed.add(what)
            self._record.reporter.warn(f"previews are not {what} any more: {error}")
            return None
