"""Reference pictures and videos: choose the condition mode, read, encode, and compare with the result."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from opensora_cli.core.choices import Fit
from opensora_cli.core.conditions import (
    CONTINUING,
    RELEASED_LENGTHS,
    T2V,
    ConditionMode,
    ReferenceLengths,
    longest_mode,
    reference_parts,
    suggested_mode,
)
from opensora_cli.core.exceptions import MediaError, RequestError, TooShortError
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.limits import read_private_memory
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.autoencoders import vae_tiling
from opensora_cli.engine.estimate.offload import ENCODE
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels, retried
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.request import PICTURE_MODE
from opensora_cli.media.resize import fit_frames, to_uint8
from opensora_cli.media.similarity import HIGHEST_PSNR_DB
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.models.vae.tiles import NO_TILING, Tiling
from opensora_cli.sampling.sizes import num_pixels
from opensora_cli.settings.enums import ReferenceRate
from opensora_cli.settings.explain import explain
from opensora_cli.settings.generate import GenerateSettings

LOW_PSNR_DB = 24.0
"""PSNR below which given frames look different. The demo's autoencoder reconstructs its own scenes at 29 dB."""
_MOST_FPS = 240
_SAME_RATE = 0.05
"""Relative difference of frame rates, such as 23.976 and 24, that nobody sees."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Given frames, fitted to the video."""

    pixels_CTHW: torch.Tensor
    """Pixels in float32, in [-1, 1]."""
    at_head: bool
    """Whether these are the first frames of the video instead of the last."""


def refined_with_mode(settings: GenerateSettings, reporter: Reporter) -> GenerateSettings:
    """Return `settings` with the prompt refined if requested, and with a condition mode."""
    if settings.refine.is_on:
        from opensora_cli.engine.generate.refinement import refined

        settings = refined(settings, reporter=reporter)
    return with_mode(settings, reporter)


def with_mode(settings: GenerateSettings, reporter: Reporter) -> GenerateSettings:
    """Return `settings` with a condition mode, which the references suggest if none is set.

    A clip to continue is counted, and brings its size and rate.
    """
    if settings.condition.continued == 0:
        settings = _as_continued(settings, reporter)
    if settings.condition.mode is not None:
        return settings
    references = settings.condition.references
    if settings.picture.first and settings.from_latents is None:
        name = PICTURE_MODE
    elif not references:
        name = T2V.name
    else:
        from opensora_cli.media.read import is_picture, read_video

        for path in references:
            if not is_picture(path):
                read_video(path, num_frames=1)
        mode = suggested_mode([is_picture(path) for path in references])
        if mode is None:
            raise RequestError(
                f"no condition mode suits these {len(references)} references by itself",
                hint="choose one with --cond, and give one file for each end of the video",
            )
        name = mode.name
    if references:
        given = "reference" if len(references) == 1 else f"{len(references)} references"
        reporter.note(f"condition: {name}, which suits the {given} given")
    return _replaced(settings, {"condition.mode": name})


def _replaced(settings: GenerateSettings, changes: Mapping[str, object]) -> GenerateSettings:
    try:
        return settings.replace(changes)
    except ValidationError as error:
        raise RequestError("\n".join(explain(error))) from error


def _as_continued(settings: GenerateSettings, reporter: Reporter) -> GenerateSettings:
    """Return settings with the size, rate and number of frames of the clip that is continued.

    Raises MediaError if it is missing, broken, a picture or too short, or if its rate varies.
    """
    from opensora_cli.media.read import probe

    [path], video, multiple = settings.condition.references, settings.video, settings.size_multiple
    facts, mode = probe(path), settings.condition.mode or CONTINUING.name
    if facts.fps is None:
        raise MediaError(f"{path} is a picture, and --continue needs a video", hint=f"--ref {path} starts from it")
    if facts.num_frames < settings.given_frames:
        frames = "1 frame" if facts.num_frames == 1 else f"{facts.num_frames} frames"
        hint = "give a longer video; --ref with --cond i2v_head starts from a single frame"
        raise MediaError(f"{path} has {frames}, and {mode} needs {settings.given_frames}", hint=hint)
    if facts.is_uneven:
        hint = f"make its rate constant: ffmpeg -i {shlex.quote(str(path))} -r 24 even.mp4"
        raise MediaError(f"{path} has frames of uneven length, and the result has one rate", hint=hint)
    most = max(num_pixels(name) for name in video.resolutions)
    scale = min(1.0, math.sqrt(most / (facts.height * facts.width)))
    # The largest size within the limit: rounding up could exceed it.
    height, width = (max(1, int(side * scale) // multiple) * multiple for side in (facts.height, facts.width))
    fps = min(max(round(facts.fps), 1), _MOST_FPS)
    needed, free = facts.num_frames * height * width * 3, read_private_memory().free_bytes
    if needed > free // 2:
        hint = f"continue its end alone: ffmpeg -sseof -10 -i {shlex.quote(str(path))} end.mp4"
        raise MediaError(
            f"{path} is too large: its {facts.num_frames:,} frames take {format_bytes(needed)} of memory, and "
            f"{format_bytes(free)} are free",
            hint=hint,
        )
    if (width, height) != (facts.width, facts.height):
        reporter.note(
            f"continue: {facts.width}x{facts.height} becomes {width}x{height}, a size of the {settings.model.name} "
            f"model (condition.fit={settings.condition.fit})"
        )
    if abs(fps - facts.fps) > 1e-3:
        reporter.note(f"continue: {facts.fps:g} frames a second become {fps}")
    size = {"video.height": height, "video.width": width, "video.fps": fps}
    return _replaced(settings, {"condition.mode": mode, "condition.continued": facts.num_frames, **size})


def references_of(plan: Plan, reporter: Reporter) -> list[Reference]:
    """Return the references of a plan from its files."""
    condition = plan.settings.condition
    if plan.decodes_only or plan.settings.picture.first or not condition.references:
        return []
    return read_references(
        condition.references,
        plan.mode,
        height=plan.height,
        width=plan.width,
        fit=condition.fit,
        causal=plan.settings.vae.grid.is_causal,
        temporal_compression=plan.settings.vae.grid.time_compression_ratio,
        lengths=plan.lengths,
        continues=condition.continued is not None,
        fps=plan.settings.video.fps,
        resample=condition.ref_fps is ReferenceRate.MATCH,
        reporter=reporter,
    )


def read_references(
    paths: Sequence[str | Path],
    mode: ConditionMode,
    *,
    height: int,
    width: int,
    fit: Fit | str = Fit.CROP,
    causal: bool = True,
    temporal_compression: int = 4,
    lengths: ReferenceLengths = RELEASED_LENGTHS,
    continues: bool = False,
    fps: float | None = None,
    resample: bool = False,
    reporter: Reporter | None = None,
) -> list[Reference]:
    """Read the `reference_parts` of a mode from files, and fit them to the video.

    Frames of a video are used without regard to their rate, unless `resample` is set. The released model was trained
    in this way.

    Args:
        causal: Whether the autoencoder encodes the first frame alone.
        temporal_compression: Frames per latent frame.
        lengths: Latent frames given by the video modes.
        continues: Whether the head is the end of the file.
        fps: Frames per second of the video.
    """
    from opensora_cli.media.read import is_picture, read_picture, read_video

    parts = reference_parts(mode, causal=causal, temporal_compression=temporal_compression, lengths=lengths)
    references: list[Reference] = []
    single_frames: dict[str | Path, list[str]] = {}
    for part, at_head in zip(parts, mode.parts_at_head, strict=True):
        path = paths[part.file_index]
        if mode.gives_pictures and is_picture(path):
            frames_THWC = read_picture(path)[None]
        else:
            rate = fps if resample and not mode.gives_pictures else None
            try:
                clip = read_video(path, num_frames=part.num_frames, from_end=part.from_end or continues, fps=rate)
            except TooShortError as error:
                other = longest_mode(
                    mode.position,
                    error.num_frames,
                    causal=causal,
                    temporal_compression=temporal_compression,
                    lengths=lengths,
                )
                hint = error.hint
                if other is not None:
                    frames = "1 frame" if other[1] == 1 else f"{other[1]} frames"
                    hint = f"{hint}, or use --cond {other[0].name}, which needs {frames}"
                raise MediaError(error.message, hint=hint) from error
            frames_THWC = clip.frames_THWC
            if mode.gives_pictures:
                single_frames.setdefault(path, []).append("last" if part.from_end else "first")
            elif fps and reporter and not continues and abs(clip.fps / fps - 1) > _SAME_RATE:
                reporter.warn(
                    f"{path} has {clip.fps:g} frames a second and the video {fps:g}: what it shows will move at "
                    f"{fps / clip.fps:.0%} of its speed; --ref-fps match resamples it"
                )
        references.append(Reference(fit_frames(frames_THWC, height=height, width=width, fit=fit), at_head))
    for path, ends in single_frames.items():
        if reporter:
            reporter.warn(
                f"{path} is a video, and {mode.name} takes its {' and '.join(ends)} frame alone; a v2v mode takes more "
                "of it"
            )
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
        """Compare the next frames of the video, uint8."""
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
