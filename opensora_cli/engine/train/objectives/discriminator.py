"""The discriminator of autoencoder training: it classifies patches of clips as real or decoded."""

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

    Kernels have 3 taps along every axis rather than 4, so that a clip of any size, one frame included, has an answer;
    norms are group norms, which need no second sample in the batch.

    Args:
        width: channels after the first layer, a multiple of 8; they double with every layer, up to 8 times as many.
        layers: strided layers, each of which halves time, height and width, rounded up; 1 or more.
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
        """Return how real each patch looks, as logits (B,1,t,h,w), for RGB clips in [-1,1]; high is real."""
        logits_B1THW: Tensor = self.layers(pixels_BCTHW)
        return logits_B1THW


def hinge_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Return a discriminator's hinge loss: the mean of max(0, 1 - real) and max(0, 1 + fake), halved in all.

    Lim & Ye 2017, "Geometric GAN" (https://arxiv.org/abs/1705.02894).
    """
    return 0.5 * (nn.functional.relu(1.0 - real_logits).mean() + nn.functional.relu(1.0 + fake_logits).mean())


def _conv(before: int, after: int, *, stride: int = 1, bias: bool = True) -> nn.Conv3d:
    conv = ClipConv3d(before, after, 3, stride=stride, padding=1, bias=bias)
    nn.init.normal_(conv.weight, std=_INITIAL_DEVIATION)
    return conv


class PatchAdversary:
    """The discriminator with its loss, on the clips that `show` gave it last.

    It has an AdamW of its own, whose rate rises and falls with that of the autoencoder's `optimizer`.
    """

    def __init__(self, settings: DiscriminatorSettings, *, optimizer: OptimizerSettings) -> None:
        self.module = PatchDiscriminator3d(width=settings.width, layers=settings.layers)
        self.forward: Callable[..., Any] = self.module
        self.optimizer = _with_rate(optimizer, settings.learning_rate)
        self._shown: tuple[Tensor, Tensor] | None = None

    def generator_loss(self, made_BCTHW: Tensor) -> Tensor:
        """Return the autoencoder's adversarial loss: minus the mean logit of decoded clips.

        Differentiate it by the clips alone, so that the discriminator gets no gradient, and DDP starts no exchange.
        """
        logits: Tensor = self.module(made_BCTHW)
        return -logits.float().mean()

    def show(self, *, real_BCTHW: Tensor, made_BCTHW: Tensor) -> None:
        """Keep clips and their reconstructions for the next `loss`."""
        self._shown = real_BCTHW.detach(), made_BCTHW.detach()

    def loss(self) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return the hinge loss on the clips since the last call, with the mean logits; None: there were none."""
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
            # Not beyond it by a rounding error, which would be refused.
            "initial_learning_rate": min(factor * optimizer.initial_learning_rate, learning_rate),
            "final_learning_rate": min(factor * optimizer.final_learning_rate, learning_rate),
        }
    )
