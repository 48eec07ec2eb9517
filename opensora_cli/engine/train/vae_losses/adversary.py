"""The discriminator as the trainer sees it: a module that learns against the autoencoder."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opensora_cli.engine.train.vae_losses.discriminator import PatchDiscriminator3d, hinge_loss
from opensora_cli.settings.optimizer import OptimizerName, OptimizerSettings
from opensora_cli.settings.train_vae import DiscriminatorSettings


class PatchAdversary:
    """Learns to tell real clips from decoded ones, from what it was last shown.

    Args:
        settings: sizes, rate and start.
        optimizer: that of the autoencoder; the discriminator's is AdamW with a rate of its own, which rises and falls
            with the autoencoder's.
    """

    def __init__(self, settings: DiscriminatorSettings, *, optimizer: OptimizerSettings) -> None:
        self.module = PatchDiscriminator3d(width=settings.width, layers=settings.layers)
        self.forward: Callable[..., Any] = self.module
        self.optimizer = _with_rate(optimizer, settings.learning_rate)
        self._shown: tuple[Tensor, Tensor] | None = None

    def disbelief(self, made_BCTHW: Tensor) -> Tensor:
        """Return what the autoencoder minimises against it: minus the mean logit of decoded clips.

        Differentiate it by the clips alone, so that no gradient is left in the discriminator; under wrappers that
        exchange gradients, the module itself must not start an exchange.
        """
        logits: Tensor = self.module(made_BCTHW)
        return -logits.float().mean()

    def show(self, *, real_BCTHW: Tensor, made_BCTHW: Tensor) -> None:
        """Take clips and what was decoded of them for the next `loss`."""
        self._shown = real_BCTHW.detach(), made_BCTHW.detach()

    def loss(self) -> tuple[Tensor, dict[str, float]] | None:
        """Return the hinge loss on what it was shown since the last time, with the mean logits; None: nothing."""
        if self._shown is None:
            return None
        shown, self._shown = self._shown, None
        # One pass for both: wrappers that exchange gradients want a single one for each backward.
        real, made = self.forward(torch.cat(shown)).float().chunk(2)
        means = {"real_logit": float(real.detach().mean()), "made_logit": float(made.detach().mean())}
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
