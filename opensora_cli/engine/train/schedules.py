"""Learning rate schedules."""

import math
from dataclasses import dataclass

from opensora_cli.settings.train_loop import OptimizerSettings, ScheduleName


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up, plateau and decay, as shares of the full rate.

    A schedule has no state: the share depends only on the number of the update. A resumed run may change the schedule.
    """

    shape: ScheduleName
    """Shape of the decay."""
    steps: int
    """Number of updates."""
    warmup_steps: int
    """First updates, with less than the full rate."""
    decay_steps: int
    """Last updates. The first of them has the full rate."""
    initial: float
    """Share of the full rate at the start of the warm-up; 0 to 1."""
    final: float
    """Share of the full rate one update after the last; 0 to 1."""

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
        """Return the share of the full rate, 0 to 1, after `update` updates, including skipped ones."""
        up = _between(self.initial, warmup_share(update, self.warmup_steps))
        left = max(self.steps - update, 0)
        if left >= self.decay_steps:
            return up
        share = left / self.decay_steps
        if self.shape is ScheduleName.COSINE:
            share = (1 - math.cos(math.pi * share)) / 2
        return min(up, _between(self.final, share))


def warmup_share(update: int, warmup_steps: int) -> float:
    """Return the progress of a linear warm-up: 1 / (warmup_steps + 1) at update 0, 1 at `warmup_steps`."""
    return min((update + 1) / (warmup_steps + 1), 1.0)


def _between(lowest: float, share: float) -> float:
    return lowest + (1 - lowest) * share
