"""Discriminator for autoencoder training, which classifies patches of clips as real or decoded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opensora_cli.models.vae.dc_ae_blocks import ClipConv3d
from opensora_cli.models.vae.group_norm import GroupNorm
from opensora_cli.settings.train_loop import OptimizerName, OptimizerSettings
from opensora_cli.settings.train_objectives import DiscriminatorSettings

_SLOPE = 0.2
_INITIAL_DEVIATION = 0.02
_MAX_WIDTH_FACTOR = 8
_CHANNELS_PER_GROUP = 8


class PatchDiscriminator3d(nn.Module):
    """PatchGAN (Isola et al. 2017, https://arxiv.org/abs/1611.07004, section 3.2.2) in three dimensions.

    Kernels have 3 taps along every axis instead of 4, so that clips of any size work, even a single frame. Norms are
    group norms, which need no second sample in the batch.

    Args:
        width: channels after the first layer, a multiple of 8. They double with every layer, up to 8 times `width`.
        layers: number of strided layers, at least 1; each halves time, height and width, rounded up.
    """

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        widths = [width * min(2**layer, _MAX_WIDTH_FACTOR) for layer in range(layers + 1)]
        stack: list[nn.Module] = [_conv(3, width, stride=2), nn.LeakyReLU(_SLOPE)]
        for layer in range(1, layers + 1):
            stack += [
                _conv(widths[layer - 1], widths[layer], stride=2 if layer < layers else 1, bias=False),
                GroupNorm(widths[layer] // _CHANNELS_PER_GROUP, widths[layer]),
                nn.LeakyReLU(_SLOPE),
            ]
        self.layers = nn.Sequential(*stack, _conv(widths[-1], 1))

    def forward(self, pixels_BCTHW: Tensor) -> Tensor:
        """Return logits (B,1,t,h,w) of the patches of RGB clips in [-1,1]; high means real."""
        logits_B1THW: Tensor = self.layers(pixels_BCTHW)
        return logits_B1THW


def hinge_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Return a discriminator's hinge loss: half the sum of the means of max(0, 1 - real) and max(0, 1 + fake).

    Lim & Ye 2017, "Geometric GAN" (https://arxiv.org/abs/1705.02894).
    """
    return 0.5 * (nn.functional.relu(1.0 - real_logits).mean() + nn.functional.relu(1.0 + fake_logits).mean())


def _conv(before: int, after: int, *, stride: int = 1, bias: bool = True) -> nn.Conv3d:
    conv = ClipConv3d(before, after, 3, stride=stride, padding=1, bias=bias)
    nn.init.normal_(conv.weight, std=_INITIAL_DEVIATION)
    return conv


class PatchAdversary:
    """Discriminator with its loss on the clips from the last call of `show`.

    It has a separate AdamW, whose learning rate follows the schedule of the autoencoder's `optimizer`.
    """

    def __init__(self, settings: DiscriminatorSettings, *, optimizer: OptimizerSettings) -> None:
        self.module = PatchDiscriminator3d(width=settings.width, layers=settings.layers)
        self.forward: Callable[..., Any] = self.module
        self.optimizer = _with_rate(optimizer, settings.learning_rate)
        self._shown: tuple[Tensor, Tensor] | None = None

    def generator_loss(self, made_BCTHW: Tensor) -> Tensor:
        """Return the autoencoder's adversarial loss: minus the mean logit of decoded clips.

        Differentiate it only by the clips, so that the discriminator gets no gradient, and DDP starts no exchange.
        """
        logits: Tensor = self.module(made_BCTHW)
        return -logits.float().mean()

    def show(self, *, real_BCTHW: Tensor, made_BCTHW: Tensor) -> None:
        """Keep clips and their reconstructions for the next `loss`."""
        self._shown = real_BCTHW.detach(), made_BCTHW.detach()

    def loss(self) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return the hinge loss on the clips since the last call, with the mean logits; None without new clips."""
        if self._shown is None:
            return None
        shown, self._shown = self._shown, None
        # One pass for both: DDP needs one forward for each backward.
        real, made = self.forward(torch.cat(shown)).float().chunk(2)
        means = {"real_logit": real.detach().mean(), "made_logit": made.detach().mean()}
        return hinge_loss(real, made), means


def _with_rate(optimizer: OptimizerSettings, learning_rate: float) -> OptimizerSettings:
    factor = learning_rate / optimizer.learning_rate
    return optimizer.replace(
        {
            "name": OptimizerName.ADAMW,
            "learning_rate": learning_rate,
            # A rounding error must not exceed the rate, which validation would refuse.
            "initial_learning_rate": min(factor * optimizer.initial_learning_rate, learning_rate),
            "final_learning_rate": min(factor * optimizer.final_learning_rate, learning_rate),
        }
    )
