"""Trainer of all objectives, and its interface to them."""

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opensora_cli.core.dtypes import torch_dtype
from opensora_cli.core.exceptions import TrainingError
from opensora_cli.core.formatting import first_few
from opensora_cli.core.progress import Reporter
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.train.distribution import Distribution, local
from opensora_cli.engine.train.optimizer import Learner, averaged_copy, module_state, swapped_in, update_ema, warmed_up
from opensora_cli.settings.train_loop import Compute, LoopSettings, OptimizerSettings

PARTS = ("data", "forward", "backward", "exchange", "optimizer", "checkpoint", "validation", "samples")
"""Parts of a step that the clock times."""
_MAX_SKIPPED_IN_A_ROW = 5
_LOSS_OF = {"model": "loss", "adversary": "adversary_loss"}
_NORM_OF = {"model": "grad_norm", "adversary": "adversary_grad_norm"}


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


class Adversary(Protocol):
    """Module that is trained against the task's module, such as a discriminator."""

    forward: Callable[..., Any]
    """Function to call instead of `module`, as `Task.forward`."""

    @property
    def module(self) -> nn.Module:
        """Module that is updated and saved."""

    @property
    def optimizer(self) -> OptimizerSettings:
        """Settings of the module's optimizer."""

    def loss(self) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return the loss on the latest results of the task's `loss`, and detached figures for the log.

        None means that no rank trains the adversary in this step.
        """


class Task(ABC):
    """Training task: a module with its loss and export."""

    module: nn.Module
    """Module that is updated, averaged and saved. It may be sharded in place before training."""
    forward: Callable[..., Any]
    """Function that `loss` calls instead of `module`: the module itself, or later its parallel wrapper."""
    adversary: Adversary | None = None
    """Adversary with a separate optimizer, or None."""

    def __init__(self, module: nn.Module) -> None:
        self.module = self.forward = module

    def begin_step(self, step: int) -> None:  # noqa: B027  # most tasks have one phase
        """Begin a new phase of training if one starts after `step` updates. A resumed run repeats the call."""

    @abstractmethod
    def loss(self, batch: Any, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss over the samples of a micro-batch, and this rank's detached figures for the log."""

    @abstractmethod
    def tokens(self, batch: Any) -> int:
        """Return the number of tokens (of captions or packed latents) of the micro-batch."""

    @abstractmethod
    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write weights for generation to the run's folder. Only the main rank calls this.

        `weights` are whole, on the host, by the names of the module's state: the average, or else the current weights.
        """


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
    """Clock that times the parts of steps on the host.

    `marks` wrap each part, to show it in profiles. `wait` synchronizes with the device at the end of each part.
    """

    def __init__(
        self,
        *,
        marks: Sequence[Callable[[str], AbstractContextManager[object]]] = (),
        wait: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._marks = marks
        self._wait = wait
        self._now = now
        self._started = now()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str, /) -> Iterator[None]:
        """Add the time of the block to a part; blocks do not nest."""
        with ExitStack() as stack:
            for mark in self._marks:
                stack.enter_context(mark(name))
            started = self._now()
            try:
                yield
                self._wait()
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

    paths: tuple[str, ...]
    samples: int
    tokens: int
    losses: Mapping[str, Tensor]
    """Loss of each learner."""
    figures: Mapping[str, Tensor]
    name: str
    """Name of the micro-batch in messages."""

    def read(self) -> tuple[dict[str, float], list[str]]:
        """Wait for the losses and figures; return them, and the samples if a loss is not finite."""
        losses = {_LOSS_OF[learner]: float(loss) for learner, loss in self.losses.items()}
        figures = {name: float(value) for name, value in self.figures.items()}
        is_finite = all(math.isfinite(loss) for loss in losses.values())
        return {**figures, **losses}, [] if is_finite else list(self.paths or [self.name])


class Trainer:
    """Trainer that does the steps of a run. It neither reads nor writes files.

    An update has M micro-batches, which the data-parallel ranks share evenly. Its gradient is the mean over all of
    them, and depends on the number of ranks only by rounding. A step whose loss or gradient is not finite on any rank
    is skipped on all ranks; several in a row end the run. The modules of the task and its adversary must be sharded.
    With `trained_only`, frozen weights and buffers are neither averaged nor saved. Raises ValueError if the ranks
    cannot share the micro-batches.
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
        self.learners = {"model": Learner(task.module, optimizer, steps=loop.steps, distribution=distribution)}
        if task.adversary is not None:
            self.learners["adversary"] = Learner(
                task.adversary.module, task.adversary.optimizer, steps=loop.steps, distribution=distribution
            )
        self.ema = None if loop.ema_decay is None else averaged_copy(task.module, trained_only=trained_only)
        self.step = 0
        self.skipped_in_a_row = 0
        self.losses: list[float] = []
        """Losses since the last checkpoint, which clears them."""
        self._loop = loop
        self._compute = compute
        self._clock = clock
        self._on_step = on_step
        self._reporter = reporter

    def averaged(self) -> AbstractContextManager[None]:
        """Swap the averaged weights into the module inside the block; without an average, do nothing."""
        return nullcontext() if self.ema is None else swapped_in(self.ema, self.task.module)

    def autocast(self) -> torch.autocast:
        """Return the autocast context for forward passes."""
        is_on = self._compute is not Compute.FP32
        return torch.autocast(self.distribution.device.type, dtype=torch_dtype(self._compute), enabled=is_on)

    def do_step(self) -> StepReport:
        """Do one step, and return its report, which `on_step` also receives.
        Raises TrainingError if the loss or gradient was not finite several steps in a row.
        """
        self.task.begin_step(self.step)
        done = self._find_gradients()
        learning = {name for each in done for name in each.losses}
        clipped = {name: self.learners[name].clip() for name in self.learners if name in learning}
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
                if self.ema is not None and self._loop.ema_decay is not None:
                    update_ema(self.ema, self.task.module, decay=warmed_up(self._loop.ema_decay, self.step))
        self.step += 1
        report = self._report(done, [figures for figures, _ in read], norms, suspects, skipped=skipped)
        self._on_step(report)
        if skipped:
            self._count_skipped(report)
        else:
            self.skipped_in_a_row = 0
            self.losses.append(report.figures["loss"])
        return report

    def are_weights_finite(self) -> bool:
        """Return whether trained weights and averages are finite on all ranks. All ranks must call this."""
        states = (module_state(each.module, trained_only=self.trained_only) for each in self.learners.values())
        tensors = [value for state in states for value in state.values()]
        parts = [local(tensor) for tensor in (*tensors, *(self.ema or {}).values())]
        # `aminmax` returns NaN if any value is NaN, in one pass and without a copy.
        extremes = [extreme.float() for part in parts if part.numel() for extreme in torch.aminmax(part)]
        return not self.distribution.any(not bool(torch.isfinite(torch.stack(extremes)).all()))

    def _find_gradients(self) -> list[_Done]:
        for learner in self.learners.values():
            learner.zero_grad()
        done = []
        count = self.micro_batches // self.distribution.data_ranks
        for index in range(count):
            with self._clock.part("data"):
                batch = self.batches.next()
            with self.distribution.accumulating(last=index == count - 1):
                losses, figures = self._backward(batch, share=1 / count)
            done.append(
                _Done(
                    paths=batch.paths,
                    samples=len(batch.paths),
                    tokens=self.task.tokens(batch),
                    losses=losses,
                    figures=figures,
                    name=f"micro-batch {batch.number}",
                )
            )
        return done

    def _backward(self, batch: Any, *, share: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Add the gradients of a micro-batch; return the loss of each learner, and figures for the log."""
        rng = SampleRng.of(self._loop.seed, batch.number)
        # The seed makes dropout inside modules the same for a micro-batch on any rank, at any time.
        torch.manual_seed(rng.torch.initial_seed())
        losses = {}
        with self._clock.part("forward"), self.autocast():
            loss, figures = self.task.loss(batch, rng)
        losses["model"] = self._add_gradients(loss, share)
        if self.task.adversary is not None:
            with self._clock.part("forward"), self.autocast():
                adversarial = self.task.adversary.loss()
            if adversarial is not None:
                loss, more = adversarial
                losses["adversary"] = self._add_gradients(loss, share)
                figures = {**figures, **more}
        return losses, figures

    def _add_gradients(self, loss: Tensor, share: float) -> Tensor:
        with self._clock.part("backward"):
            (loss * share).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _report(
        self,
        done: Sequence[_Done],
        read: Sequence[Mapping[str, float]],
        norms: Mapping[str, float],
        suspects: list[str],
        *,
        skipped: bool,
    ) -> StepReport:
        sums: defaultdict[str, float] = defaultdict(float)
        share = 1 / len(done)
        for figures in read:
            for name, value in figures.items():
                sums[name] += share * value
        sums["samples"], sums["tokens"] = sum(each.samples for each in done), sum(each.tokens for each in done)
        paths = [path for each in done for path in each.paths]
        with self._clock.part("exchange"):
            means = self.distribution.mean(sums)
            if skipped:
                paths = self._suspects(suspects, paths)
        ranks = self.distribution.data_ranks
        samples, tokens = round(means.pop("samples") * ranks), round(means.pop("tokens") * ranks)
        found = {
            **{name: means.pop(name) for name in _LOSS_OF.values() if name in means},
            **{_NORM_OF[name]: norm for name, norm in norms.items()},
            **means,
        }
        return StepReport(
            step=self.step,
            epoch=self.batches.epoch,
            figures={} if skipped else found,
            learning_rate=self.learners["model"].learning_rate,
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
