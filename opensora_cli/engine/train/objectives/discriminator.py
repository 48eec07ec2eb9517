"""Discriminator for autoencoder training, which classifies patches of clips as real or decoded."""

from torch import Tensor, nn

from opensora_cli.engine.train.trainer import Role
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


def discriminator_role(settings: DiscriminatorSettings, *, optimizer: OptimizerSettings) -> Role:
    """Return a discriminator with AdamW, whose learning rate follows the schedule of the autoencoder's `optimizer`."""
    factor = settings.learning_rate / optimizer.learning_rate
    own = optimizer.replace(
        {
            "name": OptimizerName.ADAMW,
            "learning_rate": settings.learning_rate,
            # A rounding error must not exceed the rate, which validation would refuse.
            "initial_learning_rate": min(factor * optimizer.initial_learning_rate, settings.learning_rate),
            "final_learning_rate": min(factor * optimizer.final_learning_rate, settings.learning_rate),
        }
    )
    return Role(PatchDiscriminator3d(width=settings.width, layers=settings.layers), own)
