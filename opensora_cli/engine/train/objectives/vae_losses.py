"""Losses of autoencoders: reconstruction and KL divergence, and the weight of the adversarial term.

The adversarial term is balanced against the other terms at the decoder's last layer (Esser et al. 2021). The last
layer's gradients are computed from its inputs and from a loss's gradient by the pixels. This needs neither the weight
itself, which a sharded model hides, nor a second backward pass through the decoder, and accumulates no gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_weight, conv3d_weight

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


class LastLayer:
    """Decoder's last convolution, with the inputs of the latest forward pass.

    Its output is the pixels. A three-dimensional convolution returns clips, and a two-dimensional one returns their
    frames one after the other.
    """

    def __init__(self, layer: nn.Conv2d | nn.Conv3d) -> None:
        self._layer = layer
        self._inputs: Tensor | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keep the layer's inputs while the block runs."""

        def keep(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            # Autocast computes the layer in the dtype of its output.
            self._inputs = args[0].detach().to(output.dtype)

        hook = self._layer.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()
            self._inputs = None

    def gradient_norm(self, gradient_BCTHW: Tensor) -> Tensor:
        """Return the norm of a loss's gradient by the layer's weight, in fp32, from the gradient by the pixels.

        Call it only inside `watched`.
        """
        layer, inputs = self._layer, self._inputs
        if inputs is None:
            raise RuntimeError("the last layer has not run while it was watched")
        gradient = gradient_BCTHW.to(inputs.dtype)
        shape, where = layer.weight.shape, (layer.stride, layer.padding, layer.dilation, layer.groups)
        if isinstance(layer, nn.Conv3d):
            by_weight: Tensor = conv3d_weight(inputs, shape, gradient, *where)  # type: ignore[no-untyped-call]
        else:
            gradient = gradient.transpose(1, 2).flatten(0, 1)
            by_weight = conv2d_weight(inputs, shape, gradient, *where)  # type: ignore[no-untyped-call]
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
    joined: Tensor = _KnownGradient.apply(output, value.detach(), gradient.detach())  # type: ignore[no-untyped-call]
    return joined


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return upstream * gradient, None, None
