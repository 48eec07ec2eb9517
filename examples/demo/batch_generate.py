"""Videos for many prompts at once, made as `osora generate` makes them, and kept in memory."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from opensora_cli.core.conditions import T2V, ConditionMode, reference_parts
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.components.architectures import vae_tiling
from opensora_cli.engine.encode.clips import cut_part
from opensora_cli.engine.generate.chain import alone
from opensora_cli.engine.generate.decode import Clip, decode_latents
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.outputs import sample_files
from opensora_cli.engine.generate.pipeline import make
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.references import Reference
from opensora_cli.engine.generate.sample import Sample
from opensora_cli.media.resize import fit_frames

Clips = NDArray[np.uint8]
"""(N, T, H, W, 3), RGB."""


@torch.inference_mode()
def reconstruct(plan: Plan, models: LoadedModels, clips_NTHWC: Clips) -> Clips:
    """Return clips as the autoencoder gives them back: the mode of the posterior, decoded."""
    tiling = vae_tiling(plan.settings.vae)
    decoded: list[torch.Tensor] = []
    with models.autoencoder(plan, Events(SilentReporter())) as vae:
        for clip_THWC in clips_NTHWC:
            pixels_CTHW = as_pixels(plan, clip_THWC).to(plan.hardware.device, plan.hardware.dtype)
            [latents_CTHW] = vae.encode(pixels_CTHW[None], tiling=tiling)
            decoded.append(torch.cat([*decode_latents(plan, vae, latents_CTHW)]))
    return torch.stack(decoded).numpy()


@torch.inference_mode()
def generate_clips(
    plan: Plan,
    models: LoadedModels,
    prompts: Sequence[str],
    *,
    seeds: Sequence[int],
    mode: ConditionMode = T2V,
    filmed_NTHWC: Clips | None = None,
    on_done: Callable[[int], None] = lambda _: None,
) -> Clips:
    """Return one video for each prompt.

    Args:
        plan: plan of a generation without references, with any prompt and seed.
        models: loaded models.
        prompts: one for each video.
        seeds: seeds of the noise, one for each video.
        mode: condition mode.
        filmed_NTHWC: clips with the given frames, one for each video, in any size; None without references.
        on_done: called with the number of finished videos.
    """
    clips: list[torch.Tensor] = []
    for index, prompt in enumerate(prompts):
        settings = plan.settings.replace({"prompt": prompt, "sampling.seed": seeds[index]})
        own = dataclasses.replace(plan, settings=settings, mode=mode)
        chain = alone(own)
        references = [] if filmed_NTHWC is None else given_of(own, filmed_NTHWC[index])
        sample = Sample(chain, own, dataclasses.replace(sample_files(settings, 0), latents=None), references)
        [clip_THWC] = make(chain, [sample], models, Events(SilentReporter()), finish=_frames)
        clips.append(clip_THWC)
        on_done(len(clips))
    return torch.stack(clips).numpy()


def _frames(clip: Clip) -> torch.Tensor:
    return torch.cat([*clip.pieces])


def given_of(plan: Plan, filmed_THWC: NDArray[np.uint8]) -> list[Reference]:
    """Return the frames of a clip that the plan's mode gives."""
    grid = plan.settings.vae.grid
    parts = reference_parts(
        plan.mode,
        causal=grid.is_causal,
        temporal_compression=grid.time_compression_ratio,
        lengths=plan.settings.condition.lengths,
    )
    ends = [True] * plan.mode.at_head + [False] * plan.mode.at_tail
    filmed = torch.from_numpy(filmed_THWC)
    return [
        Reference(as_pixels(plan, cut_part(filmed, part).numpy()), at_head)
        for part, at_head in zip(parts, ends, strict=True)
    ]


def as_pixels(plan: Plan, frames_THWC: NDArray[np.uint8]) -> torch.Tensor:
    """Return frames as `osora generate` reads a reference: pixels_CTHW in [-1, 1], fitted to the video."""
    return fit_frames(torch.from_numpy(frames_THWC.copy()), height=plan.height, width=plan.width, fit="crop")
