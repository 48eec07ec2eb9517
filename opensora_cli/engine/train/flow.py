"""The mathematics of one flow-matching step (rectified flow, Liu et al. 2022; logistic-normal time, Esser et al. 2024).

x0 is data and x1 noise, as packed latents (B,N,D); time runs from 1 (noise) to 0 (data).
"""

import torch
from torch import Tensor, nn


def shifted_time(normal_B: Tensor, *, shift: float) -> Tensor:
    """Turn normal draws into times in (0, 1): t = a·s / (1 + (a-1)·s) with s = sigmoid(normal) and a = `shift`.

    Args:
        normal_B: one draw for each sample.
        shift: over 1 for more time near the noise; see `schedule.flow_shift_for`.
    """
    share_B = torch.sigmoid(normal_B)
    return shift * share_B / (1.0 + (shift - 1.0) * share_B)


def noisy_latents(data_BND: Tensor, noise_BND: Tensor, t_B: Tensor, *, sigma_min: float = 1e-5) -> Tensor:
    """Return x_t = (1-t)·x0 + (1-(1-s)(1-t))·x1 with s = `sigma_min`, the noise that is left at t = 0."""
    t_B11 = t_B.view(-1, *[1] * (data_BND.ndim - 1))
    return (1.0 - t_B11) * data_BND + (1.0 - (1.0 - sigma_min) * (1.0 - t_B11)) * noise_BND


def flow_target(data_BND: Tensor, noise_BND: Tensor, *, sigma_min: float = 1e-5) -> Tensor:
    """Return the velocity that is learnt, the derivative of x_t by t: (1-s)·x1 - x0."""
    return (1.0 - sigma_min) * noise_BND - data_BND


def get_batch_loss(velocity_BND: Tensor, target_BND: Tensor) -> Tensor:
    """Return the mean squared error over all samples, tokens and channels, in fp32."""
    return nn.functional.mse_loss(velocity_BND.float(), target_BND.float())
