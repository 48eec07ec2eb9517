"""Reference pictures and videos: which mode they suggest, reading, encoding, and how well they come back."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from opensora_cli.core.conditions import (
    CONDITION_MODES,
    RELEASED_LENGTHS,
    ConditionMode,
    ReferenceLengths,
    Source,
    condition_mode,
    reference_parts,
)
from opensora_cli.core.exceptions import MediaError, RequestError, TooShortError
from opensora_cli.core.media_choices import Fit
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.autoencoders import vae_tiling
from opensora_cli.engine.estimate.offload import ENCODE
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels, retried
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.request import PICTURE_MODE
from opensora_cli.media.read import is_picture, read_picture, read_video
from opensora_cli.media.resize import fit_frames, to_uint8
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.models.vae.tiling import NO_TILING, Tiling
from opensora_cli.settings.enums import ReferenceRate
from opensora_cli.settings.explain import explain
from opensora_cli.settings.generate import GenerateSettings

# Identical frames have no finite PSNR, and JSON no infinity.
_HIGHEST_PSNR_DB = 99.0

LOW_PSNR_DB = 24.0
"""Below this, given frames are not taken for the same: the demo's autoencoder gives scenes like its own back at 29."""

# Rates such as 23.976 and 24 are the same to the eye.
_SAME_RATE = 0.05


@dataclass(frozen=True, slots=True)
class Reference:
    """Frames that are given, fitted to the video."""

    pixels_CTHW: torch.Tensor
    """float32 in [-1, 1]."""
    at_head: bool
    """True for the first frames of the video, False for its last."""


def with_mode(settings: GenerateSettings, reporter: Reporter) -> GenerateSettings:
    """Return `settings` with the condition mode filled in.

    Without a mode: `t2v` for no reference, `i2v_head` for a picture, `i2v_loop` for two, `v2v_head` for a video. A
    RequestError if the mode breaks a rule, or nothing suits the references; a MediaError if one is missing or broken.
    """
    if settings.condition.mode is not None:
        return settings
    references = settings.condition.references
    is_first = settings.picture.first and settings.from_latents is None
    mode = PICTURE_MODE if is_first else _suggested_mode(references)
    if references:
        reporter.note(f"condition: {mode}, which suits the {_count(references)} given")
    try:
        return settings.replace({"condition.mode": mode})
    except ValidationError as error:
        raise RequestError("\n".join(explain(error))) from error


def _suggested_mode(references: Sequence[str]) -> str:
    if not references:
        return "t2v"
    pictures = [_is_sound_picture(path) for path in references]
    if all(pictures) and len(pictures) <= 2:
        return "i2v_head" if len(pictures) == 1 else "i2v_loop"
    if len(pictures) == 1:
        return "v2v_head"
    raise RequestError(
        f"no condition mode suits these {len(pictures)} references by itself",
        hint="choose one with --cond, and give one file for each end of the video",
    )


def _is_sound_picture(path: str) -> bool:
    """Return False for a video, and raise MediaError for what is neither."""
    if is_picture(path):
        return True
    read_video(path, num_frames=1)
    return False


def _count(references: Sequence[str]) -> str:
    return "reference" if len(references) == 1 else f"{len(references)} references"


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
    fps: float | None = None,
    resample: bool = False,
    reporter: Reporter | None = None,
) -> list[Reference]:
    """Read what `mode` needs of the files, fit to the video: one for each of `reference_parts(mode)`, in their order.

    Frames of a video are taken as they are stored, whatever their rate, unless `resample` is set: so the released model
    was trained.

    Args:
        height: of the video, in pixels; so is `width`.
        causal: whether the autoencoder keeps the first frame on its own.
        temporal_compression: frames per latent frame.
        lengths: latent frames given by the video modes.
        fps: of the video; a reference of another rate causes a warning, or is resampled.

    Raises:
        MediaError: a file is missing, broken, of the wrong kind, or too short (with the frames that are needed, and the
            mode for which it is long enough).
    """
    rate = fps if resample and mode.source is Source.VIDEO else None
    parts = reference_parts(mode, causal=causal, temporal_compression=temporal_compression, lengths=lengths)
    references = []
    for part, at_head in zip(parts, [True] * mode.at_head + [False] * mode.at_tail, strict=True):
        path = paths[part.file_index]
        if mode.source is not Source.VIDEO and is_picture(path):
            frames_THWC = read_picture(path)[None]
        else:
            try:
                clip = read_video(path, num_frames=part.num_frames, from_end=part.from_end, fps=rate)
            except TooShortError as error:
                compression = temporal_compression
                fitting = _longest_mode(mode, error.num_frames, lengths, causal=causal, compression=compression)
                raise MediaError(error.message, hint=f"{error.hint}{fitting}") from error
            frames_THWC = clip.frames_THWC
            if mode.source is Source.VIDEO and fps and reporter and abs(clip.fps / fps - 1) > _SAME_RATE:
                reporter.warn(
                    f"{path} has {clip.fps:g} frames a second and the video {fps:g}: what it shows will move at "
                    f"{fps / clip.fps:.0%} of its speed; --ref-fps match resamples it"
                )
        references.append(Reference(fit_frames(frames_THWC, height=height, width=width, fit=fit), at_head))
    if mode.gives_pictures and reporter:
        _warn_about_videos([(paths[part.file_index], part.from_end) for part in parts], mode, reporter)
    return references


def _longest_mode(
    mode: ConditionMode, num_frames: int, lengths: ReferenceLengths, *, causal: bool, compression: int
) -> str:
    """Return the end of a hint: the mode at the same position that takes most of a video with `num_frames`."""
    needs = {
        other.name: lengths.pixel_frames(other, causal=causal, temporal_compression=compression)
        for other in CONDITION_MODES.values()
        if other.position is mode.position and other.needs_reference
    }
    fitting = [name for name, needed in needs.items() if needed <= num_frames]
    if not fitting:
        return ""
    best = max(fitting, key=lambda name: needs[name])
    return f", or use --cond {best}, which needs {needs[best]} frame{'' if needs[best] == 1 else 's'}"


def _warn_about_videos(taken: Sequence[tuple[str | Path, bool]], mode: ConditionMode, reporter: Reporter) -> None:
    """Warn of videos of which a mode takes single frames: paths, and whether the frame is the last one."""
    for path in dict.fromkeys(path for path, _ in taken):
        if not is_picture(path):
            ends = " and ".join("last" if is_last else "first" for name, is_last in taken if name == path)
            reporter.warn(
                f"{path} is a video, and {mode.name} takes its {ends} frame alone; a v2v mode takes more of it"
            )


def references_of(plan: Plan, reporter: Reporter) -> list[Reference]:
    """Return what a plan is given of files; see `read_references`."""
    if plan.decodes_only or plan.settings.picture.first:
        return []
    condition = plan.settings.condition
    return read_references(
        condition.references,
        plan.mode,
        height=plan.height,
        width=plan.width,
        fit=condition.fit,
        causal=plan.settings.vae.grid.is_causal,
        temporal_compression=plan.settings.vae.grid.time_compression_ratio,
        lengths=plan.lengths,
        fps=plan.settings.video.fps,
        resample=condition.ref_fps is ReferenceRate.MATCH,
        reporter=reporter,
    )


def encode_references(
    references: Sequence[Reference],
    vae: Autoencoder,
    *,
    tiling: Tiling = NO_TILING,
    on_encoded: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """Return the latents_CTHW of each reference, encoded on its own, with `on_encoded` called after each.

    The mode of the posterior is taken, not a sample of it: a given frame should come back as it is.
    """
    weight = next(vae.parameters())
    latents = []
    for reference in references:
        latents.append(vae.encode(reference.pixels_CTHW[None].to(weight.device, weight.dtype), tiling=tiling)[0])
        on_encoded()
    return latents


def references_to(plan: Plan, picture_1HWC: torch.Tensor) -> list[Reference]:
    """Return what a plan is given where that is a picture, uint8, and no file: the same as of a lossless file."""
    pixels_CTHW = fit_frames(picture_1HWC, height=plan.height, width=plan.width, fit=plan.settings.condition.fit)
    return [Reference(pixels_CTHW, at_head) for at_head in [True] * plan.mode.at_head + [False] * plan.mode.at_tail]


def reference_latents(
    plan: Plan, references: Sequence[Reference], models: LoadedModels, record: Events
) -> list[torch.Tensor] | None:
    """Return the latents_CTHW of each reference, as a stage of a run; None where nothing is given."""
    if not references:
        return None
    tiling = vae_tiling(plan.settings.vae)

    def encode(plan: Plan) -> list[torch.Tensor]:
        with (
            models.autoencoder(plan, record) as autoencoder,
            record.stage(ENCODE, total=len(references), unit="references") as progress,
        ):
            return encode_references(references, autoencoder, tiling=tiling, on_encoded=progress.advance)

    return retried(encode, plan, ENCODE, models, record, together=False)[0]


def collect_references_batch(
    reference_paths: Sequence[str],
    cond_type: str,
    model_ae: Autoencoder,
    image_size: tuple[int, int],
    is_causal: bool = False,
    *,
    fit: Fit | str = Fit.CROP,
    tiling: Tiling = NO_TILING,
    lengths: ReferenceLengths = RELEASED_LENGTHS,
) -> list[list[torch.Tensor] | None]:
    """Return each sample's encoded references (C,T,H,W), or None, for `prepare_inference_condition`.

    The name and the order of the first five parameters are those that the Open-Sora community knows.

    Args:
        reference_paths: for each sample its files, separated by `;`, or an empty text for none.
        cond_type: the condition mode.
        image_size: (height, width) of the video in pixels.
        is_causal: whether the autoencoder keeps the first frame on its own.
        lengths: latent frames given by the video modes.

    Raises:
        RequestError: no such mode.
        MediaError: a file is missing, broken, of the wrong kind or too short.
    """
    mode = condition_mode(cond_type)
    height, width = image_size
    batch: list[list[torch.Tensor] | None] = []
    for paths in reference_paths:
        files = [path.strip() for path in paths.split(";") if path.strip()]
        if not files or not mode.needs_reference:
            batch.append(None)
            continue
        references = read_references(
            files,
            mode,
            height=height,
            width=width,
            fit=fit,
            causal=is_causal,
            temporal_compression=model_ae.grid.time_compression_ratio,
            lengths=lengths,
        )
        batch.append(encode_references(references, model_ae, tiling=tiling))
    return batch


class GivenFramesPSNR:
    """PSNR of given frames in a video that passes piece by piece, without keeping it."""

    def __init__(self, references: Sequence[Reference], *, num_frames: int) -> None:
        # In pairs: what was given, and the position of its first frame in the video.
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
        """PSNR in dB, over all given frames that have passed; 99 at most, and None where there were none."""
        if not self._count:
            return None
        if not self._squares:
            return _HIGHEST_PSNR_DB
        return min(10 * math.log10(255**2 * self._count / self._squares), _HIGHEST_PSNR_DB)
