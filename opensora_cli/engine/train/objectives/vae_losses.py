"""Losses of autoencoders: reconstruction and KL divergence, and the weight of the adversarial term."""

import torch
from torch import Tensor, nn

_PIXEL_RANGE = 2.0  # from -1 to 1


def reconstruction_error(decoded: Tensor, pixels: Tensor, *, squared_weight: float) -> tuple[Tensor, Tensor]:
    """Return the mean absolute error plus `squared_weight` times the squared error, and the squared error alone."""
    squared = nn.functional.mse_loss(decoded, pixels)
    return nn.functional.l1_loss(decoded, pixels) + squared_weight * squared, squared


def gradient_error(decoded_BCTHW: Tensor, pixels_BCTHW: Tensor) -> Tensor:
    """Return the mean absolute error of differences between adjacent pixels, horizontal plus vertical.

    A blurred edge has a small error in its pixels and a large one in its gradients (Mathieu et al. 2016,
    https://arxiv.org/abs/1511.05440, with absolute gradients).
    """
    error_BCTHW = decoded_BCTHW - pixels_BCTHW
    return error_BCTHW.diff(dim=-1).abs().mean() + error_BCTHW.diff(dim=-2).abs().mean()


def psnr(squared_error: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio, in dB, of pixels in [-1,1] with this mean squared error."""
    return -10.0 * torch.log10(squared_error / _PIXEL_RANGE**2)


def kl_divergence(mean: Tensor, logvar: Tensor) -> Tensor:
    """Return the KL divergence from normal distributions to the standard one, in nats, as the mean over all values.

    KL(N(m, s²) || N(0, 1)) = (m² + s² - 1 - log s²) / 2 (Kingma & Welling 2014, appendix B); `logvar` is log s².
    """
    return 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()


_EPS = 1e-4
_MAX_WEIGHT = 1e4


def gradient_norm(output: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    """Return the norm of a loss's gradient by a weight, in fp32, from its gradient by an output of the layer.

    It accumulates no gradient, and keeps the graph.
    """
    (by_weight,) = torch.autograd.grad(output, weight, gradient, retain_graph=True)
    norm: Tensor = torch.linalg.vector_norm(by_weight.float())
    return norm


def adaptive_weight(reconstruction_norm: Tensor, adversarial_norm: Tensor) -> Tensor:
    """Return the weight that gives the adversarial term the same gradient norm at the last layer as the reconstruction.

    It is |g_rec| / (|g_adv| + 1e-4), at most 1e4 (Esser et al. 2021, "Taming transformers",
    https://arxiv.org/abs/2012.09841, equation 7).
    """
    return (reconstruction_norm / (adversarial_norm + _EPS)).clamp(max=_MAX_WEIGHT)


def with_gradient(output: Tensor, *, value: Tensor, gradient: Tensor) -> Tensor:
    """Return the scalar loss `value` as a function of `output` with the known `gradient`.

    So the backward pass of a loss on decoded pixels continues through the decoder after the loss's own activations are
    freed.
    """
    linear = (output * gradient.detach()).sum()
    return value.detach() + (linear - linear.detach())
