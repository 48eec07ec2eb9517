"""Previews of a video while it is denoised: a linear map from latents to colors, without the autoencoder.

The map of an autoencoder is fitted at its first use in a process.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from einops import reduce
from torch.nn.functional import interpolate

from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.exceptions import HardwareError, OsoraError
from opensora_cli.engine.components.weights import Component, stamp_of
from opensora_cli.engine.estimate.offload import DECODE
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels, retried
from opensora_cli.engine.generate.outputs import SampleFiles
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.media.resize import enlarged, to_uint8
from opensora_cli.media.write import write_media
from opensora_cli.models.vae.autoencoder import Autoencoder

_LEAST_SIZE, _LEAST_CLIPS = 64, 8
_LATENTS_A_SIDE = 8
_POSITIONS_PER_CHANNEL = 16
_BLOCKS_A_SIDE = 6
_GIF_SIDE = 256
"""Longest side of a preview in pixels, unless there are more latents."""

_fitted: dict[object, "PreviewMap"] = {}
"""Maps that this process has fitted, by the weights and settings of the autoencoder."""


@dataclass(frozen=True, slots=True)
class PreviewMap:
    """Colors of latents: bias + latents · weights, in [-1, 1]."""

    weights_C3: torch.Tensor
    bias_3: torch.Tensor

    def frames(self, latents_CTHW: torch.Tensor) -> torch.Tensor:
        """Return scaled latents as uint8 RGB (T, H, W, 3) on the CPU, with a pixel for each position."""
        weights_C3, bias_3 = (each.to(latents_CTHW.device, torch.float32) for each in (self.weights_C3, self.bias_3))
        pixels_THW3 = latents_CTHW.float().permute(1, 2, 3, 0) @ weights_C3 + bias_3
        return to_uint8(pixels_THW3.permute(3, 0, 1, 2))


def fit_preview_map(
    autoencoder: Autoencoder, clips_3THW: Iterable[torch.Tensor], *, on_clip: Callable[[], None] = lambda: None
) -> PreviewMap:
    """Fit a map by least squares to clips in [-1, 1]. `on_clip` is called after each."""
    weight, latents_NC, colors_N3 = next(autoencoder.parameters()), [], []
    for clip_3THW in clips_3THW:
        [latents_CTHW] = autoencoder.encode(clip_3THW[None].to(weight.device, weight.dtype)).cpu().double()
        latents_NC.append(latents_CTHW.flatten(1).T)
        colors_N3.append(latent_colors(autoencoder, clip_3THW).flatten(1).T)
        on_clip()
    inputs_NC = torch.cat(latents_NC)
    inputs_NC = torch.cat([inputs_NC, inputs_NC.new_ones(len(inputs_NC), 1)], dim=1)
    solution = torch.linalg.lstsq(inputs_NC, torch.cat(colors_N3)).solution
    return PreviewMap(solution[:-1], solution[-1])


def latent_colors(autoencoder: Autoencoder, clip_3THW: torch.Tensor) -> torch.Tensor:
    """Return the mean of the pixels and frames of each latent position of a clip, colors_3THW in float64."""
    grid = autoencoder.grid
    space, first = grid.spatial_compression_ratio, int(grid.is_causal)
    # The first latent frame of a causal autoencoder is the first frame alone.
    spans = (clip_3THW[:, :first], 1), (clip_3THW[:, first:], grid.time_compression_ratio)
    colors = [
        reduce(part.double(), "c (t r) (h p) (w q) -> c t h w", "mean", r=ratio, p=space, q=space)
        for part, ratio in spans
    ]
    return torch.cat(colors, dim=1)


def color_blocks(autoencoder: Autoencoder) -> tuple[int, Iterator[torch.Tensor]]:
    """Return the number of clips to fit a map to, and the clips_3THW: plain color blocks that change once.

    They have 16 positions for each unknown of a map. A map that is fitted to them shows the scenes of the demo at 22 dB
    PSNR; one that is fitted to such scenes at 23 dB; one that is fitted to smooth colors at 16 dB.
    """
    grid = autoencoder.grid
    size = max(_LEAST_SIZE, _LATENTS_A_SIDE * grid.spatial_compression_ratio)
    frames = grid.longest_clip(2 * grid.time_compression_ratio + 1)
    positions = grid.latent_frames(frames) * math.prod(grid.latent_size(size, size))
    count = max(_LEAST_CLIPS, math.ceil(_POSITIONS_PER_CHANNEL * (grid.latent_channels + 1) / positions))
    shape = count, 1, 3, min(2, frames), _BLOCKS_A_SIDE, _BLOCKS_A_SIDE
    colors = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return count, (interpolate(each_13THW, (frames, size, size))[0] for each_13THW in colors)


def preview_map(plan: Plan, models: LoadedModels, events: Events) -> PreviewMap | None:
    """Return the map of a plan's autoencoder, fitted if necessary; None, with a warning, without memory."""

    def fit(plan: Plan) -> PreviewMap:
        with models.autoencoder(plan, events) as autoencoder:
            count, clips = color_blocks(autoencoder)
            with events.stage("preview", total=count, unit="clips") as progress:
                return fit_preview_map(autoencoder, clips, on_clip=progress.advance)

    key = stamp_of(plan.weights.path(Component.VAE)), plan.settings.vae.model_dump_json()
    try:
        if key not in _fitted:
            _fitted[key], _ = retried(fit, plan, DECODE, models, events)
    except HardwareError as error:
        events.reporter.warn(f"there will be no previews: {error.message}")
    return _fitted.get(key)


class Previews:
    """Writer of previews during sampling; a failure ends only the previews, and without colors there are none."""

    def __init__(self, plan: Plan, colors: PreviewMap | None, events: Events) -> None:
        self._settings, self._colors, self._events = plan.settings, colors, events

    def step(self, sample: SampleFiles, steps: int, predicted_CTHW: Callable[[], torch.Tensor]) -> None:
        """Write the predicted video of a sample after `steps` if a preview is due."""
        settings, every = self._settings, self._settings.output.preview_every
        ends_exploring = settings.output.explore and steps == settings.sampling.stop_at
        if self._colors is None or not (ends_exploring or (every is not None and steps % every == 0)):
            return
        fps = settings.video.fps / settings.vae.grid.time_compression_ratio
        try:
            shown_CTHW = predicted_CTHW()[:, : settings.num_latent_frames]
            frames_THWC = enlarged(self._colors.frames(shown_CTHW), longest_side=_GIF_SIDE)
            write_media([frames_THWC], sample.preview, fps=fps, format=MediaFormat.GIF)
            self._events.hooks.on_preview(sample.preview)
        except (OsoraError, OSError, RuntimeError) as error:
            self._colors = None
            self._events.reporter.warn(f"there are no more previews: {error}")
