"""Previews of a video while it is denoised, without its autoencoder: a linear map from latents to colors.

The map of the demo is part of osora. The map of another autoencoder is fitted at first use, and kept in the user's
cache.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from einops import reduce

from opensora_cli.core.exceptions import FileProblem, HardwareError, OsoraError, OutputError
from opensora_cli.core.files import user_cache, write_json_atomic
from opensora_cli.core.media_choices import MediaFormat
from opensora_cli.core.reading import read_json_object
from opensora_cli.data.scene_clips import SceneClip
from opensora_cli.engine.components.weights import Component, packaged_demo, stamp_of
from opensora_cli.engine.estimate.offload import DECODE
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels, retried
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.targets import SampleFiles, preview_path
from opensora_cli.media.resize import to_uint8
from opensora_cli.media.sheets import enlarged
from opensora_cli.media.write import write_media
from opensora_cli.models.vae.autoencoder import Autoencoder

_SCHEMA = "osora.preview-map/1"
_LEAST_SIZE, _LEAST_CLIPS = 64, 8
_LATENTS_A_SIDE = 8
_POSITIONS_PER_CHANNEL = 16
_FPS = 12.0
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class PreviewMap:
    """A colour for each latent position: bias + latents · weights, in [-1, 1]."""

    weights_C3: torch.Tensor
    """float64, on the CPU."""
    bias_3: torch.Tensor

    def frames(self, latents_CTHW: torch.Tensor) -> torch.Tensor:
        """Return scaled latents as uint8 RGB (T, H, W, 3) on the CPU, one pixel for each position."""
        weights_C3, bias_3 = (part.to(latents_CTHW.device, torch.float32) for part in (self.weights_C3, self.bias_3))
        pixels_THW3 = latents_CTHW.float().permute(1, 2, 3, 0) @ weights_C3 + bias_3
        return to_uint8(pixels_THW3.permute(3, 0, 1, 2))

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> Self | None:
        """Return what `to_json` has written; None where that is something else."""
        try:
            weights_C3 = torch.tensor(document["weights"], dtype=torch.float64)
            bias_3 = torch.tensor(document["bias"], dtype=torch.float64)
        except (KeyError, TypeError, ValueError, RuntimeError):
            return None
        is_whole = weights_C3.ndim == 2 and weights_C3.shape[1:] == bias_3.shape == (3,)
        are_finite = bool(weights_C3.isfinite().all() and bias_3.isfinite().all())
        return cls(weights_C3, bias_3) if document.get("schema") == _SCHEMA and is_whole and are_finite else None

    def to_json(self) -> dict[str, Any]:
        """Return a document from which `of_json` makes it again."""
        weights, bias = (part.to(torch.float64).tolist() for part in (self.weights_C3, self.bias_3))
        rounded = [[float(f"{value:.{_DIGITS}g}") for value in row] for row in (*weights, bias)]
        return {"schema": _SCHEMA, "weights": rounded[:-1], "bias": rounded[-1]}


def fit_preview_map(autoencoder: Autoencoder, *, on_clip: Callable[[], None] = lambda: None) -> PreviewMap:
    """Fit the map by least squares to rendered scenes as `autoencoder` encodes them; the same weights, the same map.

    What a latent position should show is the mean of the pixels and frames that it stands for. `on_clip` is called
    after each of the `count_clips`.
    """
    latents_NC, colours_N3 = [], []
    for number in range(count_clips(autoencoder)):
        clip_CTHW, colours_3thw = preview_example(autoencoder, SceneClip(seed=0, number=number))
        latents_NC.append(clip_CTHW.flatten(1).T)
        colours_N3.append(colours_3thw.flatten(1).T)
        on_clip()
    inputs_NC = torch.cat(latents_NC)
    inputs_NC = torch.cat([inputs_NC, inputs_NC.new_ones(len(inputs_NC), 1)], dim=1)
    solution_C3 = torch.linalg.lstsq(inputs_NC, torch.cat(colours_N3)).solution
    return PreviewMap(solution_C3[:-1], solution_C3[-1])


def count_clips(autoencoder: Autoencoder) -> int:
    """Return how many clips have many times more positions than latents have channels, at least 8."""
    grid, (frames, size) = autoencoder.grid, _clip_shape(autoencoder)
    positions = grid.latent_frames(frames) * math.prod(grid.latent_size(size, size))
    return max(_LEAST_CLIPS, math.ceil(_POSITIONS_PER_CHANNEL * (grid.latent_channels + 1) / positions))


def preview_example(autoencoder: Autoencoder, clip: SceneClip) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rendered clip's scaled latents_CTHW, and what a preview of them should show (3,T,H,W), in [-1, 1].

    Both are float64, on the CPU.
    """
    grid, (frames, size) = autoencoder.grid, _clip_shape(autoencoder)
    weight = next(autoencoder.parameters())
    levels_THWC = torch.from_numpy(clip.render(size=size, num_frames=frames, fps=_FPS))
    pixels_3THW = (levels_THWC.double() / 127.5 - 1).permute(3, 0, 1, 2)
    [latents_CTHW] = autoencoder.encode(pixels_3THW[None].to(weight.device, weight.dtype)).cpu().double()
    space, first = grid.spatial_compression_ratio, int(grid.is_causal)
    # Of a causal one, the first latent frame is the first frame alone.
    spans = (pixels_3THW[:, :first], 1), (pixels_3THW[:, first:], grid.time_compression_ratio)
    colours = [
        reduce(part, "c (t r) (h p) (w q) -> c t h w", "mean", r=ratio, p=space, q=space) for part, ratio in spans
    ]
    return latents_CTHW, torch.cat(colours, dim=1)


def _clip_shape(autoencoder: Autoencoder) -> tuple[int, int]:
    """Return the frames of a clip, of two or three latent frames, and its side in pixels."""
    grid = autoencoder.grid
    size = max(_LEAST_SIZE, _LATENTS_A_SIDE * grid.spatial_compression_ratio)
    return grid.longest_clip(2 * grid.time_compression_ratio + 1), size


def known_map(plan: Plan) -> PreviewMap | None:
    """Return the map of a plan's autoencoder; None where it is still to be fitted."""
    file = _file_of(plan)
    try:
        found = None if file is None else PreviewMap.of_json(read_json_object(file))
    except (FileProblem, ValueError):
        return None
    return found if found is not None and len(found.weights_C3) == plan.latent_shape[0] else None


def preview_map(plan: Plan, models: LoadedModels, record: Events) -> PreviewMap | None:
    """Return the map of a plan's autoencoder, fitted and kept if it is not known; None, with a warning, where there is
    no room for that. A CheckpointError if the autoencoder's weights are broken.
    """
    if (known := known_map(plan)) is not None:
        return known

    def fit(plan: Plan) -> PreviewMap:
        with (
            models.autoencoder(plan, record) as autoencoder,
            record.stage("preview", total=count_clips(autoencoder), unit="clips") as progress,
        ):
            return fit_preview_map(autoencoder, on_clip=progress.advance)

    record.reporter.note(f"previews: {fitting_line(plan)}")
    try:
        fitted, _ = retried(fit, plan, DECODE, models, record, together=False)
    except HardwareError as error:
        record.reporter.warn(f"there will be no previews: {error.message}")
        return None
    file = _file_of(plan)
    try:
        if file is not None:
            write_json_atomic(file, fitted.to_json())
    except OutputError as error:
        record.reporter.warn(f"what previews need is not kept for the next time: {error.message}")
    return fitted


def fitting_line(plan: Plan) -> str:
    """Return for people that the map of a plan's autoencoder is to be fitted, and where it is kept."""
    file = _file_of(plan)
    kept = "" if file is None else f", and kept in {file.parent}"
    return f"the colours of this autoencoder's latents are not known yet: they are fitted first{kept}"


def demo_map_file() -> Path:
    """Return where the map of the demo's autoencoder is."""
    return packaged_demo() / "vae.preview.json"


def _file_of(plan: Plan) -> Path | None:
    """Return where the map of a plan's autoencoder is kept, or would be; None where the user has no cache."""
    weights, settings = plan.weights.path(Component.VAE), plan.settings.vae
    if weights.parent == packaged_demo():
        return demo_map_file()
    folder = user_cache("previews")
    made_of = repr((stamp_of(weights), settings.kind.value, settings.model_dump(mode="json")))
    return folder and folder / f"{hashlib.sha256(made_of.encode()).hexdigest()[:32]}.json"


T = TypeVar("T")

_GIF_SIDE = 256
"""Pixels of the longer side, at most, unless there are more latents."""


class Previews:
    """Writes previews after every few steps, as `output.preview_every` asks for, and at the end of exploring.

    A failure is a warning once, and ends no run.
    """

    def __init__(self, plan: Plan, map_: PreviewMap, record: Events) -> None:
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
        self._record.on_preview(path)

    def _tried(self, what: str, action: Callable[[], T]) -> T | None:
        if what in self._failed:
            return None
        try:
            return action()
        except (OsoraError, OSError, RuntimeError, ValueError) as error:
            self._failed.add(what)
            self._record.reporter.warn(f"previews are not {what} any more: {error}")
            return None
