"""Noise and timesteps of sampling with rectified flow.

Time runs from 1 (noise) to 0 (data), after Liu et al., "Flow Straight and Fast" (arXiv 2209.03003). The shift towards
noise for larger frames is that of Esser et al., "Scaling Rectified Flow Transformers" (arXiv 2403.03206, 5.3.2).
"""

import math
from collections.abc import Sequence

import torch

# The shift is 1 (none) for frames of 256 tokens and 3 for 4096 tokens, and linear in the number of tokens.
_BASE_TOKENS = 256
_TOKENS_PER_UNIT_SHIFT = (4096 - 256) / 2


def flow_shift_for(*, tokens_per_frame: int, num_latent_frames: int) -> float:
    """Return the flow shift that the released model was trained with: (1 + (tokens - 256)·2/3840)·sqrt(frames)."""
    return (1.0 + (tokens_per_frame - _BASE_TOKENS) / _TOKENS_PER_UNIT_SHIFT) * math.sqrt(num_latent_frames)


def shifted_times(times: torch.Tensor, shift: float) -> torch.Tensor:
    """Return a·t / (1 + (a-1)·t) for times t in [0, 1] and a = `shift`; a shift over 1 moves times towards noise."""
    return shift * times / (1.0 + (shift - 1.0) * times)


def flow_timesteps(
    num_inference_steps: int, *, tokens_per_frame: int, num_latent_frames: int, flow_shift: float | None = None
) -> list[float]:
    """Return the `num_inference_steps + 1` timesteps from 1 down to 0, the ends of the steps.

    Evenly spaced times are shifted by `flow_shift`; 1 keeps them, and None means the value of `flow_shift_for`.
    """
    if flow_shift is None:
        flow_shift = flow_shift_for(tokens_per_frame=tokens_per_frame, num_latent_frames=num_latent_frames)
    # In fp32 like the reference, so that the times are bitwise identical.
    times = torch.linspace(1.0, 0.0, num_inference_steps + 1, dtype=torch.float32, device="cpu")
    # One by one, which outlines of tensors allow, too.
    return [float(each) for each in shifted_times(times, flow_shift)]


def latent_size(height: int, width: int, *, spatial_compression: int = 8, patch_size: int = 2) -> tuple[int, int]:
    """Return the latent (height, width) of a picture with a size in pixels: whole patches, rounded up.

    `spatial_compression` is in pixels per latent position, `patch_size` in latent positions per token, each way.
    """
    step = spatial_compression * patch_size
    return patch_size * math.ceil(height / step), patch_size * math.ceil(width / step)


def noise_latents(
    seeds: Sequence[int],
    *,
    num_latent_frames: int,
    height: int,
    width: int,
    device: torch.device | str,
    dtype: torch.dtype,
    latent_channels: int = 16,
    spatial_compression: int = 8,
    patch_size: int = 2,
) -> torch.Tensor:
    """Return the starting noise in latents_BCTHW, one sample for each seed; `height` and `width` are in pixels.

    Each sample is one `torch.randn` from its own generator on the target device and in its dtype, as in the reference.
    """
    latent_height, latent_width = latent_size(
        height, width, spatial_compression=spatial_compression, patch_size=patch_size
    )
    shape = (1, latent_channels, num_latent_frames, latent_height, latent_width)
    samples = [
        torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=dtype)
        for seed in seeds
    ]
    return torch.cat(samples)
