"""Training tasks, and the trainer of all of them."""

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opensora_cli.core.device import torch_dtype
from opensora_cli.core.exceptions import TrainingError
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.data.batches import ClipBatch, SampledBatches, SampleRng
from opensora_cli.data.loading import BatchStream
from opensora_cli.engine.train.distribution import Distribution, local
from opensora_cli.engine.train.optimizer import Learner, averaged_copy, module_state, swapped_in, update_ema
from opensora_cli.engine.train.parallelize import Recipe, shard
from opensora_cli.settings.train_sections import Compute, LoopSettings, OptimizerSettings

MODEL = "model"
"""Role of the weights that a run exports, with the optimizer of the settings."""

Losses = Iterator[tuple[str, Tensor, Mapping[str, Tensor]]]
"""Roles with their losses, and detached figures for the log."""

PARTS = ("data", "forward", "backward", "exchange", "optimizer", "checkpoint", "validation", "samples")
"""Parts of a step that the clock times."""
_MAX_SKIPPED_IN_A_ROW = 5
_SAMPLES, _TOKENS = "samples", "tokens"


@dataclass(slots=True)
class Role:
    """Weights with an optimizer of their own, such as a discriminator, or a second adapter in the task's module."""

    module: nn.Module
    optimizer: OptimizerSettings
    """Settings of the optimizer, whose schedule counts all steps of the run."""
    owns: Callable[[str], bool] = lambda name: True
    """Function that returns whether a weight of the module belongs to the role, by its name."""
    forward: Callable[..., Any] = field(init=False)
    """Function to call instead of `module`: the module itself, or later its parallel wrapper."""

    def __post_init__(self) -> None:
        self.forward = self.module


class Task(ABC):
    """Training task: a module with its loss and export.

    `module` is updated, averaged and saved; it may be sharded in place before training. `forward` is called instead of
    it: the module itself, or later its parallel wrapper. `roles` are others than `MODEL`, which has the weights of
    `module` that they do not own.
    """

    module: nn.Module
    forward: Callable[..., Any]
    roles: Mapping[str, Role]

    def __init__(self, module: nn.Module, *, roles: Mapping[str, Role] | None = None) -> None:
        self.module = self.forward = module
        self.roles = roles or {}

    def begin_step(self, step: int) -> None:  # noqa: B027  # most tasks have one phase
        """Begin a new phase of training if one starts after `step` updates. A resumed run repeats the call."""

    @abstractmethod
    def loss(self, batch: Any, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss over the samples of a micro-batch, and this rank's detached figures for the log."""

    def losses(self, batch: Any, rng: SampleRng) -> Losses:
        """Yield the loss of each role that learns in this step; the next is computed after its backward pass.

        All micro-batches of a step have the same roles. A role without a loss is not updated. The backward pass of a
        loss must reach only weights of its role.
        """
        yield MODEL, *self.loss(batch, rng)

    @abstractmethod
    def tokens(self, batch: Any) -> int:
        """Return the number of tokens (of captions or packed latents) of the micro-batch."""

    @abstractmethod
    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write weights for generation to the run's folder. Only the main rank calls this.

        `weights` are whole, on the host, by the names of the module's state: the average, or else the current weights.
        """

    def other_modules(self) -> dict[str, nn.Module]:
        return {name: role.module for name, role in self.roles.items() if role.module is not self.module}

    def trained(self, name: str) -> dict[str, nn.Parameter]:
        """Return the trained weights of a role by name, in the order of its module."""
        if role := self.roles.get(name):
            owned = {key: weight for key, weight in role.module.named_parameters() if role.owns(key)}
        else:
            others = [role for role in self.roles.values() if role.module is self.module]
            owned = {
                key: weight
                for key, weight in self.module.named_parameters()
                if not any(role.owns(key) for role in others)
            }
        return {key: weight for key, weight in owned.items() if weight.requires_grad}

    def shard(self, distribution: Distribution, *, recipe: Recipe | None = None) -> None:
        """Reduce the modules to this rank's parts. `recipe` is that of `parallelize.shard`."""
        self.forward = shard(self.module, distribution, trained=self.trained(MODEL).values(), recipe=recipe)
        for name, role in self.roles.items():
            if role.module is not self.module:
                role.forward = shard(role.module, distribution, trained=self.trained(name).values())
            elif distribution.mesh is not None and not distribution.divides:
                # Every rank has whole weights, and gradients are averaged.
                role.forward = distribution.replicate(role.module, self.trained(name).values())
            else:
                role.forward = self.forward


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Report of one update, which is skipped if the loss or gradient was not finite."""

    step: int
    """Number of finished steps, including this one."""
    epoch: int
    figures: Mapping[str, float]
    """`loss`, `grad_norm` and figures of the task: means over all micro-batches and ranks; empty if skipped."""
    learning_rate: float
    samples: int
    tokens: int
    """Number of tokens of all ranks; `samples` counts all ranks, too."""
    seconds: Mapping[str, float]
    """Seconds of this rank by `PARTS`, and `total` from the end of the last step to the end of this one."""
    skipped: bool
    paths: tuple[str, ...]
    """Paths of this rank's samples; for a skipped step, samples of all ranks that may be the cause."""


class Clock:
    """Clock that times the parts of steps on the host. `mark` wraps each part, to show it in profiles."""

    def __init__(
        self,
        *,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._mark = mark
        self._now = now
        self._started = now()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str, /) -> Iterator[None]:
        """Add the time of the block to a part; blocks do not nest."""
        with self._mark(name):
            started = self._now()
            try:
                yield
            finally:
                self._seconds[name] += self._now() - started

    def take(self) -> dict[str, float]:
        now = self._now()
        seconds = {**self._seconds, "total": now - self._started}
        self._started, self._seconds = now, defaultdict(float)
        return seconds


class Trainer:
    """Trainer that does the steps of a run. It neither reports nor writes files.

    An update has M micro-batches, which the data-parallel ranks share evenly. Its gradient is the mean over all of
    them, and depends on the number of ranks only by rounding. A step whose loss or gradient is not finite on any rank
    is skipped on all ranks. The task must be sharded. With `trained_only`, frozen weights and buffers are neither
    averaged nor saved. Raises ValueError if the ranks cannot share the micro-batches.
    """

    def __init__(
        self,
        task: Task,
        batches: BatchStream | SampledBatches,
        *,
        loop: LoopSettings,
        optimizer: OptimizerSettings,
        compute: Compute,
        distribution: Distribution,
        clock: Clock,
        trained_only: bool = False,
    ) -> None:
        self.task, self.batches, self.distribution = task, batches, distribution
        self.trained_only = trained_only
        self.micro_batches = loop.micro_batches or distribution.data_ranks
        if self.micro_batches % distribution.data_ranks:
            raise ValueError(f"{distribution.data_ranks} ranks cannot share {self.micro_batches} micro-batches")
        optimizers = {MODEL: optimizer, **{name: role.optimizer for name, role in task.roles.items()}}
        self.learners = {
            name: Learner(task.trained(name), chosen, steps=loop.steps, distribution=distribution)
            for name, chosen in optimizers.items()
        }
        self.ema = None if loop.ema_decay is None else averaged_copy(task.module, trained_only=trained_only)
        self.step = 0
        self.skipped_in_a_row = 0
        self._loop, self._compute, self._clock = loop, torch_dtype(compute), clock

    def averaged(self) -> AbstractContextManager[None]:
        """Swap the averaged weights into the module inside the block; without an average, do nothing."""
        return nullcontext() if self.ema is None else swapped_in(self.ema, self.task.module)

    def autocast(self) -> torch.autocast:
        is_on = self._compute is not torch.float32
        return torch.autocast(self.distribution.device.type, dtype=self._compute, enabled=is_on)

    def do_step(self) -> StepReport:
        self.task.begin_step(self.step)
        for learner in self.learners.values():
            learner.zero_grad()
        count = self.micro_batches // self.distribution.data_ranks
        batches, queued = [], []
        for index in range(count):
            with self._clock.part("data"):
                batches.append(self.batches.next())
            queued.append(self._add_gradients(batches[-1], share=1 / count, last=index == count - 1))
        learning = [role for role in self.learners if _figure(role, "loss") in queued[-1]]
        clipped = {role: self.learners[role].clip() for role in learning}
        # Here the host waits for the device, which by now has all work up to the update.
        read = [{name: float(value) for name, value in figures.items()} for figures in queued]
        norms = {role: float(norm) for role, norm in clipped.items()}
        suspects = [
            path
            for batch, figures in zip(batches, read, strict=True)
            if not all(math.isfinite(figures[_figure(role, "loss")]) for role in learning)
            for path in batch.paths or (f"micro-batch {batch.number}",)
        ]
        with self._clock.part("exchange"):
            has_finite_loss = not self.distribution.any(bool(suspects))
        # The norms already cover all ranks.
        skipped = not has_finite_loss or not all(math.isfinite(norm) for norm in norms.values())
        with self._clock.part("optimizer"):
            for learner in self.learners.values():
                learner.set_rates(self.step)
            if not skipped:
                for role in learning:
                    self.learners[role].update()
                if MODEL in norms and self.ema is not None and self._loop.ema_decay is not None:
                    # Early steps average over fewer weights, to forget the initial ones.
                    decay = min(self._loop.ema_decay, (1 + self.step) / (10 + self.step))
                    update_ema(self.ema, self.task.module, decay=decay)
        self.step += 1
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        return self._report(batches, read, norms, suspects, skipped=skipped)

    def raise_if_stuck(self) -> None:
        """Raise TrainingError if the loss or gradient was not finite several steps in a row."""
        if self.skipped_in_a_row >= _MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"loss or gradient was not finite {_MAX_SKIPPED_IN_A_ROW} steps in a row, up to step {self.step}",
                hint="use a lower rate: --set optimizer.learning_rate=X",
            )

    def are_weights_finite(self) -> bool:
        """Return whether trained weights and averages are finite on all ranks. All ranks must call this."""
        states = [module_state(self.task.module, trained_only=self.trained_only), self.ema or {}]
        states += [module_state(module) for module in self.task.other_modules().values()]
        parts = [local(tensor) for state in states for tensor in state.values()]
        # `aminmax` returns NaN if any value is NaN, in one pass and without a copy.
        extremes = [extreme.float() for part in parts if part.numel() for extreme in torch.aminmax(part)]
        return not self.distribution.any(not bool(torch.isfinite(torch.stack(extremes)).all()))

    def _add_gradients(self, batch: ClipBatch, *, share: float, last: bool) -> dict[str, Tensor]:
        """Add the gradients of a micro-batch, the last one of the update or not; return its losses and figures."""
        figures: dict[str, Tensor] = {}
        rng = SampleRng.of(self._loop.seed, batch.number)
        # The seed makes dropout inside modules the same for a micro-batch on any rank, at any time.
        torch.manual_seed(rng.torch.initial_seed())
        losses = self.task.losses(batch, rng)
        with self.distribution.accumulating(last=last):
            while True:
                with self._clock.part("forward"), self.autocast():
                    found = next(losses, None)
                if found is None:
                    return figures
                role, loss, more = found
                with self._clock.part("backward"):
                    (loss * share).backward()  # type: ignore[no-untyped-call]
                figures.update({_figure(role, "loss"): loss.detach(), **more})

    def _report(
        self,
        batches: Sequence[ClipBatch],
        read: Sequence[Mapping[str, float]],
        norms: Mapping[str, float],
        suspects: list[str],
        *,
        skipped: bool,
    ) -> StepReport:
        means = {name: sum(figures[name] for figures in read) / len(read) for name in read[0]}
        paths = [path for batch in batches for path in batch.paths]
        tokens = sum(self.task.tokens(batch) for batch in batches)
        with self._clock.part("exchange"):
            means = self.distribution.mean({**means, _SAMPLES: len(paths), _TOKENS: tokens})
            if skipped:
                # Samples of all ranks with a loss that is not finite, or else all samples of the step.
                of_ranks = all_gather_json([suspects, paths]) if self.distribution.ranks > 1 else [[suspects, paths]]
                suspected, all_paths = (list(dict.fromkeys(chain(*each))) for each in zip(*of_ranks, strict=True))
                paths = suspected or all_paths
        samples, tokens = (round(means.pop(name) * self.distribution.data_ranks) for name in (_SAMPLES, _TOKENS))
        found = {
            **{name: means.pop(name) for name in [_figure(role, "loss") for role in norms]},
            **{_figure(role, "grad_norm"): norm for role, norm in norms.items()},
            **means,
        }
        return StepReport(
            step=self.step,
            epoch=self.batches.epoch,
            figures={} if skipped else found,
            learning_rate=self.learners[MODEL].learning_rate,
            samples=samples,
            tokens=tokens,
            seconds=self._clock.take(),
            skipped=skipped,
            paths=tuple(paths),
        )


def _figure(role: str, name: str) -> str:
    return name if role == MODEL else f"{role}_{name}"
