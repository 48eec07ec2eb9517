"""A module with all that updates it."""

import torch
from torch import Tensor, nn

from opensora_cli.engine.train.optimizer import build_optimizers, set_rates
from opensora_cli.engine.train.precision import Precision
from opensora_cli.engine.train.schedules import Schedule
from opensora_cli.engine.train.strategy.distribution import Distribution
from opensora_cli.settings.optimizer import OptimizerSettings


class Learner:
    """Turns the gradients of a module into updates.

    Args:
        module: sharded already.
        settings: of its optimizer.
        steps: of the run.
        distribution: of the ranks.
    """

    def __init__(
        self, module: nn.Module, settings: OptimizerSettings, *, steps: int, distribution: Distribution
    ) -> None:
        self.module = module
        self.optimizers: list[torch.optim.Optimizer] = build_optimizers(module, settings)
        self._schedule = Schedule.of(settings, steps=steps)
        self._max_grad_norm = settings.max_grad_norm
        self._distribution = distribution

    @property
    def learning_rate(self) -> float:
        """Of the last update, in the first group of weights."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    @property
    def rates(self) -> list[float]:
        """Of the last update, in all groups of weights."""
        return [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]

    def forget_gradients(self) -> None:
        """Begin a new update."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def clip(self, precision: Precision) -> Tensor:
        """Scale the gradients down where they are too large, and return their norm before, over all ranks."""
        precision.unscale(self.module)
        return self._distribution.clip_grad_norm(self.module, self._max_grad_norm)

    def set_rates(self, step: int) -> None:
        """Set the rates of an update.

        Args:
            step: updates before it.
        """
        set_rates(self.optimizers, self._schedule.factor(step))

    def update(self) -> None:
        """Update the weights."""
        for optimizer in self.optimizers:
            optimizer.step()
