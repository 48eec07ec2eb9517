"""Reference pictures and videos: read, encode, and compare with the result."""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from opensora_cli.core.choices import Fit
from opensora_cli.core.conditions import ConditionMode, ReferencePart, reference_parts
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.architectures import vae_tiling
from opensora_cli.engine.estimate.offload import ENCODE
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels, retried
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.media.read import is_picture, read_picture, read_video
from opensora_cli.media.resize import fit_frames, to_uint8
from opensora_cli.media.similarity import HIGHEST_PSNR_DB
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.models.vae.config import NO_TILING, Tiling

LOW_PSNR_DB = 24.0
"""PSNR below which given frames look different. The demo's autoencoder reconstructs its own scenes at 29 dB."""
_SAME_RATE = 0.05
"""Relative difference of frame rates, such as 23.976 and 24, that nobody sees."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Given frames, fitted to the video."""

    pixels_CTHW: torch.Tensor
    """Pixels in float32, in [-1, 1]."""
    at_head: bool
    """Whether these are the first frames of the video instead of the last."""


def references_of(plan: Plan, reporter: Reporter) -> list[Reference]:
    condition, grid = plan.settings.condition, plan.settings.vae.grid
    if plan.decodes_only or plan.settings.picture.first or not condition.references:
        return []
    ratio, lengths = grid.time_compression_ratio, condition.lengths
    return read_references(
        condition.references,
        plan.mode,
        reference_parts(plan.mode, causal=grid.is_causal, temporal_compression=ratio, lengths=lengths),
        height=plan.height,
        width=plan.width,
        fit=condition.fit,
        continues=condition.continued is not None,
        fps=plan.settings.video.fps,
        reporter=reporter,
    )


def read_references(
    paths: Sequence[str | Path],
    mode: ConditionMode,
    parts: Sequence[ReferencePart],
    *,
    height: int,
    width: int,
    fit: Fit | str = Fit.CROP,
    continues: bool = False,
    fps: float | None = None,
    reporter: Reporter | None = None,
) -> list[Reference]:
    """Read the `reference_parts` of a mode from files, and fit them to the video.

    Frames of a video are used without regard to their rate. The released model was trained in this way.

    Args:
        continues: whether the head is the end of the file.
        fps: frames per second of the video.
    """
    references: list[Reference] = []
    warnings: dict[str, None] = {}
    for part, at_head in zip(parts, mode.parts_at_head, strict=True):
        path = paths[part.file_index]
        if mode.gives_pictures and is_picture(path):
            frames_THWC = read_picture(path)[None]
        else:
            clip = read_video(path, num_frames=part.num_frames, from_end=part.from_end or continues)
            frames_THWC = clip.frames_THWC
            if mode.gives_pictures:
                warnings[f"{path} is a video, and {mode.name} takes single frames; a v2v mode takes more of it"] = None
            elif fps and not continues and abs(clip.fps / fps - 1) > _SAME_RATE:
                text = f"{path} has {clip.fps:g} frames a second and the video {fps:g}: what it shows will move at "
                again = f"ffmpeg -i {shlex.quote(str(path))} -r {fps:g} FILE makes one at its speed"
                warnings[f"{text}{fps / clip.fps:.0%} of its speed; {again}"] = None
        references.append(Reference(fit_frames(frames_THWC, height=height, width=width, fit=fit), at_head))
    for warning in warnings:
        if reporter:
            reporter.warn(warning)
    return references


def references_to(plan: Plan, frames_THWC: torch.Tensor) -> list[Reference]:
    """Return the references of a plan from uint8 frames in memory, as from a lossless file."""
    pixels_CTHW = fit_frames(frames_THWC, height=plan.height, width=plan.width, fit=plan.settings.condition.fit)
    return [Reference(pixels_CTHW, at_head) for at_head in plan.mode.parts_at_head]


def encode_references(
    references: Sequence[Reference],
    vae: Autoencoder,
    *,
    tiling: Tiling = NO_TILING,
    on_encoded: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """Return the latents_CTHW of each reference, encoded alone. `on_encoded` is called after each.

    The latents are the mode of the posterior, not a sample, so that given frames come back unchanged.
    """
    weight = next(vae.parameters())
    latents = []
    for reference in references:
        latents.append(vae.encode(reference.pixels_CTHW[None].to(weight.device, weight.dtype), tiling=tiling)[0])
        on_encoded()
    return latents


def reference_latents(
    plan: Plan, references: Sequence[Reference], models: LoadedModels, events: Events
) -> list[torch.Tensor] | None:
    """Return the latents_CTHW of each reference, as a stage of a run; None without references."""
    if not references:
        return None

    def encode(plan: Plan) -> list[torch.Tensor]:
        with (
            models.autoencoder(plan, events) as autoencoder,
            events.stage(ENCODE, total=len(references), unit="references") as progress,
        ):
            tiling = vae_tiling(plan.settings.vae)
            return encode_references(references, autoencoder, tiling=tiling, on_encoded=progress.advance)

    return retried(encode, plan, ENCODE, models, events)[0]


class GivenFramesPSNR:
    """Running PSNR of the references in a video that arrives piece by piece."""

    def __init__(self, references: Sequence[Reference], *, num_frames: int) -> None:
        # Each reference, with the position of its first frame in the video.
        self._given = [
            (reference.pixels_CTHW, 0 if reference.at_head else num_frames - reference.pixels_CTHW.shape[1])
            for reference in references
        ]
        self._passed = 0
        self._squares, self._count = 0.0, 0

    def add(self, piece_THWC: torch.Tensor) -> None:
        for index, shown_HWC in enumerate(piece_THWC, start=self._passed):
            for pixels_CTHW, start in self._given:
                if start <= index < start + pixels_CTHW.shape[1]:
                    [given_HWC] = to_uint8(pixels_CTHW.narrow(1, index - start, 1))
                    self._squares += (shown_HWC.double() - given_HWC.double()).square().sum().item()
                    self._count += given_HWC.numel()
        self._passed += len(piece_THWC)

    @property
    def db(self) -> float | None:
        """PSNR in dB over all given frames that have passed; 99 at most, and None without any."""
        if not self._count:
            return None
        if not self._squares:
            return HIGHEST_PSNR_DB
        return min(10 * math.log10(255**2 * self._count / self._squares), HIGHEST_PSNR_DB)
