"""How far a video, and its latents, are from those of the exact run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from opensora_cli.media.similarity import SSIM_WINDOW, psnr_db, ssim


@dataclass(frozen=True, slots=True)
class Likeness:
    """How alike two videos of one size are."""

    psnr_db: float
    """Over RGB, mean over frames; 99 of a frame that is the same."""
    ssim: float | None
    """Of the luma, mean over frames; None where a side is shorter than its window of 11 pixels."""
    latents_error: float
    """Norm of the latents' difference over that of the exact run's."""
    is_same: bool
    """Whether latents and frames are the same bit for bit."""


def likeness(
    latents: Sequence[Tensor],
    frames_THWC: Tensor,
    exact_latents: Sequence[Tensor],
    exact_THWC: Tensor,
    *,
    on_frame: Callable[[], None] = lambda: None,
) -> Likeness:
    """Compare a video, uint8 frames and the latents_CTHW of each segment, with the exact run's; `on_frame` is called
    after each frame.
    """
    psnrs, ssims = [], []
    for frame_HWC, exact_HWC in zip(frames_THWC, exact_THWC, strict=True):
        psnrs.append(psnr_db(frame_HWC, exact_HWC))
        if min(frame_HWC.shape[:2]) >= SSIM_WINDOW:
            ssims.append(ssim(frame_HWC, exact_HWC))
        on_frame()
    return Likeness(
        psnr_db=fmean(psnrs),
        ssim=fmean(ssims) if ssims else None,
        latents_error=latents_error(latents, exact_latents),
        is_same=torch.equal(frames_THWC, exact_THWC)
        and all(torch.equal(ours, exact) for ours, exact in zip(latents, exact_latents, strict=True)),
    )


def latents_error(latents: Sequence[Tensor], exact_latents: Sequence[Tensor]) -> float:
    """Return the norm of the difference of latents, which are those of segments, over that of the exact run's."""
    difference = norm = 0.0
    for ours, exact in zip(latents, exact_latents, strict=True):
        difference += float((ours.double() - exact.double()).square().sum())
        norm += float(exact.double().square().sum())
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)
