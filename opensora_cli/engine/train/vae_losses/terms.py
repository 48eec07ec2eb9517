"""The plain terms of an autoencoder's objective: how far pixels are off, and how far the posterior is from normal."""

import torch
from torch import Tensor, nn

_PIXEL_RANGE = 2.0  # from -1 to 1


def reconstruction_error(decoded: Tensor, pixels: Tensor, *, squared_weight: float) -> tuple[Tensor, Tensor]:
    """Return the mean absolute error plus `squared_weight` times the mean squared one, and the latter alone.

    Args:
        decoded: what the decoder made of the latents.
        pixels: what was encoded, of the same shape, in [-1,1].
        squared_weight: 0 or more.
    """
    squared = nn.functional.mse_loss(decoded, pixels)
    return nn.functional.l1_loss(decoded, pixels) + squared_weight * squared, squared


def psnr(squared_error: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio, in dB, of pixels in [-1,1] with this mean squared error."""
    return -10.0 * torch.log10(squared_error / _PIXEL_RANGE**2)


def kl_divergence(mean: Tensor, logvar: Tensor) -> Tensor:
    """Return the divergence of normal distributions from the standard one, in nats, as the mean over all values.

    KL(N(m, s²) || N(0, 1)) = (m² + s² - 1 - log s²) / 2 (Kingma & Welling 2014, appendix B).

    Args:
        mean: m.
        logvar: log s², of the same shape.
    """
    return 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
