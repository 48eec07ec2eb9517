"""Trainer of all objectives."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from opensora_cli.core.device import torch_dtype
from opensora_cli.core.exceptions import TrainingError
from opensora_cli.core.formatting import first_few
from opensora_cli.core.progress import Reporter
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.train.distribution import Distribution, local
from opensora_cli.engine.train.objectives.base import MODEL, Losses, Task
from opensora_cli.engine.train.optimizer import Learner, averaged_copy, module_state, swapped_in, update_ema, warmed_up
from opensora_cli.settings.train_loop import Compute, LoopSettings, OptimizerSettings

PARTS = ("data", "forward", "backward", "exchange", "optimizer", "checkpoint", "validation", "samples")
"""Parts of a step that the clock times."""
_MAX_SKIPPED_IN_A_ROW = 5
_SAMPLES, _TOKENS = "samples", "tokens"


class Batch(Protocol):
    """Micro-batch."""

    @property
    def number(self) -> int:
        """Number of the micro-batch in the whole run, over all ranks and epochs, from 0."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Names of the samples, for the log of skipped steps."""


class BatchSource(Protocol):
    """Source of this rank's micro-batches. With R data-parallel ranks, rank r gets r, r+R, r+2R and so on."""

    @property
    def epoch(self) -> int:
        """Epoch of the latest micro-batch, or of the first one before any, from 0."""

    def next(self) -> Any:
        """Return this rank's next `Batch`. The source never ends."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, without prefetched micro-batches, as plain values and tensors.

        Call this between updates, when all ranks have had equally many. The result is the same for any number of ranks.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a result of `state_dict`. Raises CheckpointError if the state belongs to other data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Report of one update, which may be skipped."""

    step: int
    """Number of finished steps, including this one."""
    epoch: int
    figures: Mapping[str, float]
    """`loss`, `grad_norm` and figures of the task: means over all micro-batches and ranks; empty if skipped."""
    learning_rate: float
    samples: int
    """Number of samples of all ranks."""
    tokens: int
    """Number of tokens of all ranks."""
    seconds: Mapping[str, float]
    """Seconds of this rank by `PARTS`, and `total` from the end of the last step to the end of this one."""
    skipped: bool
    """Whether nothing was updated because the loss or gradient was not finite."""
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
        """Return the seconds of each part, and `total`, since the last call."""
        now = self._now()
        seconds = {**self._seconds, "total": now - self._started}
        self._started, self._seconds = now, defaultdict(float)
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """Micro-batch whose gradients are added, or queued on the device."""

    batch: Batch
    tokens: int
    losses: Mapping[str, Tensor]
    """Loss of each role that learns."""
    figures: Mapping[str, Tensor]

    def read(self) -> tuple[dict[str, float], list[str]]:
        """Wait for the losses and figures; return them, and the samples if a loss is not finite."""
        losses = {_figure(role, "loss"): float(loss) for role, loss in self.losses.items()}
        figures = {name: float(value) for name, value in self.figures.items()}
        is_finite = all(math.isfinite(loss) for loss in losses.values())
        return {**losses, **figures}, [] if is_finite else list(
            self.batch.paths or [f"micro-batch {self.batch.number}"]
        )


class Trainer:
    """Trainer that does the steps of a run. It neither reads nor writes files.

    An update has M micro-batches, which the data-parallel ranks share evenly. Its gradient is the mean over all of
    them, and depends on the number of ranks only by rounding. A step whose loss or gradient is not finite on any rank
    is skipped on all ranks; several in a row end the run. The task must be sharded. With `trained_only`, frozen weights
    and buffers are neither averaged nor saved. Raises ValueError if the ranks cannot share the micro-batches.
    """

    def __init__(
        self,
        task: Task,
        batches: BatchSource,
        *,
        loop: LoopSettings,
        optimizer: OptimizerSettings,
        compute: Compute,
        distribution: Distribution,
        clock: Clock,
        on_step: Callable[[StepReport], object] = lambda report: None,
        reporter: Reporter,
        trained_only: bool = False,
    ) -> None:
        self.task = task
        self.batches = batches
        self.distribution = distribution
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
        self.losses: list[float] = []
        """Losses since the last checkpoint, which clears them."""
        self._loop = loop
        self._compute = torch_dtype(compute)
        self._clock = clock
        self._on_step = on_step
        self._reporter = reporter

    def averaged(self) -> AbstractContextManager[None]:
        """Swap the averaged weights into the module inside the block; without an average, do nothing."""
        return nullcontext() if self.ema is None else swapped_in(self.ema, self.task.module)

    def autocast(self) -> torch.autocast:
        """Return the autocast context for forward passes."""
        is_on = self._compute is not torch.float32
        return torch.autocast(self.distribution.device.type, dtype=self._compute, enabled=is_on)

    def do_step(self) -> StepReport:
        """Do one step, and return its report, which `on_step` also receives.
        Raises TrainingError if the loss or gradient was not finite several steps in a row.
        """
        self.task.begin_step(self.step)
        for learner in self.learners.values():
            learner.zero_grad()
        count = self.micro_batches // self.distribution.data_ranks
        done = [self._add_gradients(share=1 / count, last=index == count - 1) for index in range(count)]
        clipped = {name: self.learners[name].clip() for name in self.learners if name in done[-1].losses}
        # Here the host waits for the device, which by now has all work up to the update.
        read = [each.read() for each in done]
        norms = {name: float(norm) for name, norm in clipped.items()}
        suspects = [path for _, paths in read for path in paths]
        with self._clock.part("exchange"):
            has_finite_loss = not self.distribution.any(bool(suspects))
        # The norms already cover all ranks.
        skipped = not has_finite_loss or not all(math.isfinite(norm) for norm in norms.values())
        with self._clock.part("optimizer"):
            for learner in self.learners.values():
                learner.set_rates(self.step)
            if not skipped:
                for name in norms:
                    self.learners[name].update()
                if MODEL in norms and self.ema is not None and self._loop.ema_decay is not None:
                    update_ema(self.ema, self.task.module, decay=warmed_up(self._loop.ema_decay, self.step))
        self.step += 1
        report = self._report(done, [figures for figures, _ in read], norms, suspects, skipped=skipped)
        self._on_step(report)
        if skipped:
            self._count_skipped(report)
        else:
            self.skipped_in_a_row = 0
            self.losses += [report.figures["loss"]] if MODEL in norms else []
        return report

    def are_weights_finite(self) -> bool:
        """Return whether trained weights and averages are finite on all ranks. All ranks must call this."""
        states = [module_state(self.task.module, trained_only=self.trained_only), self.ema or {}]
        states += [module_state(module) for module in self.task.other_modules().values()]
        parts = [local(tensor) for state in states for tensor in state.values()]
        # `aminmax` returns NaN if any value is NaN, in one pass and without a copy.
        extremes = [extreme.float() for part in parts if part.numel() for extreme in torch.aminmax(part)]
        return not self.distribution.any(not bool(torch.isfinite(torch.stack(extremes)).all()))

    def _add_gradients(self, *, share: float, last: bool) -> _Done:
        """Add the gradients of the next micro-batch, the last one of the update or not."""
        with self._clock.part("data"):
            batch = self.batches.next()
        losses: dict[str, Tensor] = {}
        figures: dict[str, Tensor] = {}
        with self.distribution.accumulating(last=last):
            for role, loss, more in self._losses(batch):
                with self._clock.part("backward"):
                    (loss * share).backward()  # type: ignore[no-untyped-call]
                losses[role] = loss.detach()
                figures.update(more)
        return _Done(batch=batch, tokens=self.task.tokens(batch), losses=losses, figures=figures)

    def _losses(self, batch: Batch) -> Losses:
        rng = SampleRng.of(self._loop.seed, batch.number)
        # The seed makes dropout inside modules the same for a micro-batch on any rank, at any time.
        torch.manual_seed(rng.torch.initial_seed())
        losses = self.task.losses(batch, rng)
        while True:
            with self._clock.part("forward"), self.autocast():
                found = next(losses, None)
            if found is None:
                return
            yield found

    def _report(
        self,
        done: Sequence[_Done],
        read: Sequence[Mapping[str, float]],
        norms: Mapping[str, float],
        suspects: list[str],
        *,
        skipped: bool,
    ) -> StepReport:
        means = {name: sum(figures[name] for figures in read) / len(read) for name in read[0]}
        paths = [path for each in done for path in each.batch.paths]
        with self._clock.part("exchange"):
            means = self.distribution.mean({**means, _SAMPLES: len(paths), _TOKENS: sum(each.tokens for each in done)})
            if skipped:
                paths = self._suspects(suspects, paths)
        ranks = self.distribution.data_ranks
        samples, tokens = round(means.pop(_SAMPLES) * ranks), round(means.pop(_TOKENS) * ranks)
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

    def _suspects(self, suspects: list[str], paths: list[str]) -> list[str]:
        """Return the samples of all ranks with a loss that is not finite, or else all samples of the step."""
        found = [[suspects, paths]]
        if self.distribution.ranks > 1:
            found = all_gather_json([suspects, paths])
        suspected = [path for each, _ in found for path in each]
        return list(dict.fromkeys(suspected or (path for _, each in found for path in each)))

    def _count_skipped(self, report: StepReport) -> None:
        self.skipped_in_a_row += 1
        samples = f": {first_few(report.paths)}" if report.paths else ""
        self._reporter.warn(f"step {self.step}: loss or gradient is not finite, the step is skipped{samples}")
        if self.skipped_in_a_row == _MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"loss or gradient was not finite {_MAX_SKIPPED_IN_A_ROW} steps in a row, up to step {self.step}",
                hint="use a lower rate: --set optimizer.learning_rate=X",
            )


def _figure(role: str, name: str) -> str:
    return name if role == MODEL else f"{role}_{name}"
