"""The learning rate over time."""

import math
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LRScheduler

from opensora_cli.settings.train_loop import OptimizerSettings, ScheduleName


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A linear warm-up, a plateau, and a way down, as shares of the full rate.

    It has no state: the share depends on the number of the update alone, and a resumed run may change it.
    """

    shape: ScheduleName
    """Of the way down."""
    steps: int
    """Updates in all."""
    warmup_steps: int
    """First updates, below the full rate."""
    decay_steps: int
    """Last updates, of which the first has the full rate."""
    initial: float
    """Share that the warm-up rises from; 0 to 1."""
    final: float
    """Share that the way down ends at, which would be one update after the last; 0 to 1."""

    @classmethod
    def of(cls, settings: OptimizerSettings, *, steps: int) -> "Schedule":
        """Return the schedule of a run of `steps` updates."""
        cosine = settings.schedule is ScheduleName.COSINE
        return cls(
            shape=settings.schedule,
            steps=steps,
            warmup_steps=settings.warmup_steps,
            decay_steps=max(steps - settings.warmup_steps, 0) if cosine else settings.decay_steps,
            initial=settings.initial_learning_rate / settings.learning_rate,
            final=settings.final_learning_rate / settings.learning_rate,
        )

    def factor(self, update: int) -> float:
        """Return the share of the full rate, 0 to 1; `update` counts those before, also skipped: 0 to `steps` - 1."""
        up = _between(self.initial, warmup_share(update, self.warmup_steps))
        left = max(self.steps - update, 0)
        if left >= self.decay_steps:
            return up
        share = left / self.decay_steps
        if self.shape is ScheduleName.COSINE:
            share = (1 - math.cos(math.pi * share)) / 2
        return min(up, _between(self.final, share))


def warmup_share(update: int, warmup_steps: int) -> float:
    """Return how far a linear warm-up has come: from 1 / (warmup_steps + 1) at update 0 to 1 at `warmup_steps`."""
    return min((update + 1) / (warmup_steps + 1), 1.0)


def _between(lowest: float, share: float) -> float:
    return lowest + (1 - lowest) * share


class LinearWarmupLR(LRScheduler):
    """Raises each group's rate linearly, and leaves it at its full value; `last_epoch` is the steps done, less 1."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, initial_lr: float = 0, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        self.initial_lr = initial_lr
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rates of the coming step."""
        share = warmup_share(self.last_epoch, self.warmup_steps)
        return [self.initial_lr + (full - self.initial_lr) * share for full in self.base_lrs]


class CosineWarmupLR(LRScheduler):
    """Raises each group's rate linearly from 0, then lowers it along half a cosine to 0 at `total_steps`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        # Its attributes are what is saved: plain numbers can be read again safely.
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rates of the coming step."""
        schedule = Schedule(
            shape=ScheduleName.COSINE,
            steps=self.total_steps,
            warmup_steps=self.warmup_steps,
            decay_steps=max(self.total_steps - self.warmup_steps, 0),
            initial=0.0,
            final=0.0,
        )
        return [full * schedule.factor(self.last_epoch) for full in self.base_lrs]


def create_lr_scheduler(
    optimizer: torch.optim.Optimizer,
    num_steps_per_epoch: int,
    epochs: int = 1000,
    warmup_steps: int | None = None,
    use_cosine_scheduler: bool = False,
    initial_lr: float = 1e-6,
) -> LRScheduler | None:
    """Return what changes an optimizer's rates, step by step; None without warm-up and cosine.

    With `use_cosine_scheduler` the warm-up rises from 0, and the rate then falls to 0 along half a cosine, at the end
    of `num_steps_per_epoch` x `epochs`. Without it, the warm-up rises from `initial_lr`.
    """
    if use_cosine_scheduler:
        return CosineWarmupLR(optimizer, total_steps=num_steps_per_epoch * epochs, warmup_steps=warmup_steps or 0)
    if warmup_steps is None:
        return None
    return LinearWarmupLR(optimizer, initial_lr=initial_lr, warmup_steps=warmup_steps)
