"""Math of flow matching: rectified flow (Liu et al. 2022) with logistic-normal time (Esser et al. 2024).

x0 is data and x1 noise, as packed latents (B,N,D); time runs from 1 (noise) to 0 (data).
"""

import torch
from torch import Tensor, nn


def shifted_time(normal_B: Tensor, *, shift: float) -> Tensor:
    """Return times in (0, 1) from normal samples: t = a·s / (1 + (a-1)·s) with s = sigmoid(normal) and a = `shift`.

    A shift over 1 moves times towards noise; see `schedule.flow_shift_for`.
    """
    share_B = torch.sigmoid(normal_B)
    return shift * share_B / (1.0 + (shift - 1.0) * share_B)


def noisy_latents(data_BND: Tensor, noise_BND: Tensor, t_B: Tensor, *, sigma_min: float = 1e-5) -> Tensor:
    """Return x_t = (1-t)·x0 + (1-(1-s)(1-t))·x1 with s = `sigma_min`, the remaining noise at t = 0."""
    t_B11 = t_B.view(-1, *[1] * (data_BND.ndim - 1))
    return (1.0 - t_B11) * data_BND + (1.0 - (1.0 - sigma_min) * (1.0 - t_B11)) * noise_BND


def flow_target(data_BND: Tensor, noise_BND: Tensor, *, sigma_min: float = 1e-5) -> Tensor:
    """Return the target velocity, the derivative of x_t by t: (1-s)·x1 - x0."""
    return (1.0 - sigma_min) * noise_BND - data_BND


def get_batch_loss(velocity_BND: Tensor, target_BND: Tensor, masks_BTHW: Tensor | None = None) -> Tensor:
    """Return the mean squared error over samples, tokens and channels of packed latents, in fp32.

    `masks_BTHW` is 1 where latents are given. A given first or last frame does not count, unless frames between them
    are also given. Every sample has the same weight for any number of remaining frames. A sample without remaining
    frames counts as zero.
    Raises ValueError if tokens do not divide into the frames of the masks, or if masks have an axis of channels, as
    from `prepare_inference_condition`: use `masks[:, 0]`.
    """
    if masks_BTHW is None:
        return nn.functional.mse_loss(velocity_BND.float(), target_BND.float())
    if masks_BTHW.ndim != 4:
        raise ValueError(f"masks of shape {tuple(masks_BTHW.shape)} are not (batch, frames, height, width)")
    batch, frames = masks_BTHW.shape[:2]
    if velocity_BND.shape[0] != batch or velocity_BND.shape[1] % frames:
        raise ValueError(f"{tuple(velocity_BND.shape)} tokens are not {batch} samples of {frames} frames")
    squares_BND = (velocity_BND.float() - target_BND.float()).square()
    error_BT = squares_BND.reshape(batch, frames, -1).mean(dim=2)
    kept_BT = _learned_frames(masks_BTHW).to(error_BT)
    return ((error_BT * kept_BT).sum(dim=1) / kept_BT.sum(dim=1).clamp(min=1.0)).mean()


def _learned_frames(masks_BTHW: Tensor) -> Tensor:
    """Return (B,T), False for given first and last frames of samples without given frames between them."""
    given_BT = masks_BTHW.flatten(2).amax(dim=2) > 0
    only_ends_B1 = ~given_BT[:, 1:-1].any(dim=1, keepdim=True)
    learned_BT = torch.ones_like(given_BT)
    learned_BT[:, :1] = ~(given_BT[:, :1] & only_ends_B1)
    learned_BT[:, -1:] &= ~(given_BT[:, -1:] & only_ends_B1)
    return learned_BT


def weighted_loss(velocity_BND: Tensor, target_BND: Tensor, weights_BN: Tensor) -> Tensor:
    """Return the mean squared error of packed latents over the micro-batch, weighted by token, in fp32."""
    error_BN = (velocity_BND.float() - target_BND.float()).square().mean(dim=2)
    weights_BN = weights_BN.to(error_BN)
    return (error_BN * weights_BN).sum() / weights_BN.sum()
