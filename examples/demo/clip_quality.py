"""Similarity of clips, and their sharpness."""

import numpy as np
import torch

from batch_generate import Clips
from opensora_cli.media import similarity


def psnr_db(clips_NTHWC: Clips, others_NTHWC: Clips) -> list[float]:
    """Return the PSNR of each clip against the other, over all frames, in dB of the range 0 to 255; 99 at most."""
    pairs = zip(torch.from_numpy(clips_NTHWC), torch.from_numpy(others_NTHWC), strict=True)
    return [similarity.psnr_db(clip, other) for clip, other in pairs]


def ssim(clips_NTHWC: Clips, others_NTHWC: Clips) -> float:
    """Return the mean SSIM of all frames with the others."""
    pairs = zip(*(torch.from_numpy(clips).flatten(0, 1) for clips in (clips_NTHWC, others_NTHWC)), strict=True)
    return float(np.mean([similarity.ssim(frame_HWC, other_HWC) for frame_HWC, other_HWC in pairs]))


def root_mean_square(clips_NTHWC: Clips, others_NTHWC: Clips) -> float:
    """Return the root mean squared difference of clips, averaged over them, as a share of the range 0 to 255."""
    pairs = zip(torch.from_numpy(clips_NTHWC), torch.from_numpy(others_NTHWC), strict=True)
    return float(np.mean([(clip.float() - other.float()).square().mean().sqrt().item() / 255 for clip, other in pairs]))


def detail(clips_NTHWC: Clips) -> float:
    """Return how sharp clips are: the mean squared difference of pixels that are side by side or above each other."""
    squares = [
        clip_THWC.float().diff(dim=axis).square().mean().item()
        for clip_THWC in torch.from_numpy(clips_NTHWC)
        for axis in (1, 2)
    ]
    return float(np.mean(squares))
