"""The training loop that all targets share: step, average, log, checkpoint, resume."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from opensora_cli.checkpoint.saver import write_state
from opensora_cli.core.exceptions import CheckpointError, OsoraError, OutputError, RequestError
from opensora_cli.core.files import atomic_path, write_bytes_atomic
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.train.files import CHECKPOINT_FILE, LOG_FILE
from opensora_cli.engine.train.interrupts import uninterrupted
from opensora_cli.engine.train.optimizer import build_optimizers, load_moments, rate_factor, set_rates
from opensora_cli.settings.train import LoopSettings, OptimizerSettings

_MAX_SKIPPED_IN_A_ROW = 5
# What torch raises for a broken checkpoint, or for one of another model.
_BROKEN = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, UnpicklingError)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Chance:
    """Where a step's randomness comes from: its batch, and noise as tensors."""

    rng: np.random.Generator
    generator: torch.Generator

    @classmethod
    def of_step(cls, seed: int, step: int) -> "Chance":
        """Return what depends on the seed and the step alone, so that a resumed run repeats an uninterrupted one."""
        rng = np.random.default_rng((seed, step))
        return cls(rng, torch.Generator().manual_seed(int(rng.integers(2**31))))


class Task(Protocol[ModuleT]):
    """One thing to train."""

    module: ModuleT
    """What is updated, averaged and exported."""

    def begin_step(self, step: int, ema: ModuleT) -> None:
        """Rework the weights and their average where a new phase of training begins.

        May come twice for the same step, after an interruption or a resume: the second time must change nothing.
        """

    def loss(self, step: int, chance: Chance) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a fresh batch, and figures for the log."""

    def export(self, ema: ModuleT, folder: Path) -> None:
        """Write the averaged weights in the form that generating reads."""


@dataclass
class _Window:
    """What has happened since the last line of the log."""

    started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    skipped: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, figures: dict[str, float] | None) -> None:
        self.steps += 1
        self.skipped += figures is None
        for name, value in (figures or {}).items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def line(self, *, step: int, learning_rate: float) -> dict[str, float]:
        counted = max(self.steps - self.skipped, 1)
        return {
            "step": step,
            **{name: round(total / counted, 6) for name, total in self.sums.items()},
            "learning_rate": learning_rate,
            "seconds_per_step": round((time.perf_counter() - self.started) / max(self.steps, 1), 4),
            "skipped": self.skipped,
        }


@torch.no_grad()
def update_ema(ema_model: nn.Module, model: nn.Module, *, decay: float) -> None:
    """Move the averaged weights towards the current ones: ema = decay * ema + (1 - decay) * weight, in place.

    A weight that a model uses in two places counts once.

    Args:
        ema_model: the averaged copy, of the same structure.
        model: the model in training.
        decay: 0 to 1; 1 leaves the average as it is.
    """
    averaged, current = (
        [value.detach() for value in (*kind.parameters(), *kind.buffers()) if value.is_floating_point()]
        for kind in (ema_model, model)
    )
    matching = [value.to(average.dtype) for average, value in zip(averaged, current, strict=True)]
    torch._foreach_lerp_(averaged, matching, 1.0 - decay)


class Trainer(Generic[ModuleT]):
    """Trains a task, from the start or from its newest checkpoint.

    The output folder gets a checkpoint (weights, averages, moments of the optimizers, the step), a log with one JSON
    object a line, and at the end what the task exports. A step whose loss or gradient is not finite changes nothing and
    is counted in the log; several in a row end the run.

    Args:
        task: what to train.
        loop: how long, and what to keep.
        optimizer: how to update.
        output: the folder.
        reporter: hears of progress.
    """

    def __init__(
        self,
        task: Task[ModuleT],
        *,
        loop: LoopSettings,
        optimizer: OptimizerSettings,
        output: Path,
        reporter: Reporter,
    ) -> None:
        self.task = task
        self.optimizers = build_optimizers(task.module, optimizer)
        self.ema = deepcopy(task.module).requires_grad_(False).eval()
        self.step = 0
        self._loop = loop
        self._settings = optimizer
        self._output = output
        self._reporter = reporter
        self._skipped_in_a_row = 0

    def run(self) -> None:
        """Train to the last step, then export.

        Raises:
            OsoraError: the loss was not finite several steps in a row.
            OutputError: checkpoint, log or export cannot be written.
            KeyboardInterrupt: its argument says how to go on from the checkpoint, which an interruption leaves.
        """
        try:
            self._train()
            self.save()
            self.task.export(self.ema, self._output)
        except KeyboardInterrupt as interrupt:
            self.save()
            raise KeyboardInterrupt(
                f"step {self.step} of {self._loop.steps} is saved in {self._output}: go on with --resume"
            ) from interrupt

    def _train(self) -> None:
        window = _Window()
        with self._reporter.stage("train", total=self._loop.steps, unit="steps") as progress:
            if self.step:
                progress.advance(self.step)
            while self.step < self._loop.steps:
                window.add(self.do_step())
                progress.advance()
                if self.step % self._loop.log_every == 0:
                    self._log(window)
                    window = _Window()
                if self.step % self._loop.checkpoint_every == 0:
                    self.save()

    def do_step(self) -> dict[str, float] | None:
        """Do one step; return its figures, or None if loss or gradient were not finite and nothing was updated."""
        # Held back while weights change, Ctrl-C always finds them as they are after a whole number of steps.
        with uninterrupted():
            self.task.begin_step(self.step, self.ema)
        figures = self._find_gradient()
        with uninterrupted():
            if figures is not None:
                self._update()
            self.step += 1
        if figures is None:
            self._count_skipped()
        else:
            self._skipped_in_a_row = 0
        return figures

    def _find_gradient(self) -> dict[str, float] | None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        module = self.task.module
        device = next(module.parameters()).device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self._loop.autocast_bf16):
            loss, figures = self.task.loss(self.step, Chance.of_step(self._loop.seed, self.step))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(module.parameters(), self._settings.max_grad_norm)
        if not bool(torch.isfinite(loss.detach() + norm)):
            return None
        return {"loss": float(loss.detach()), "grad_norm": float(norm), **figures}

    def _update(self) -> None:
        warmup, decay = self._settings.warmup_steps, self._settings.decay_steps
        factor = rate_factor(self.step, steps=self._loop.steps, warmup_steps=warmup, decay_steps=decay)
        set_rates(self.optimizers, factor)
        for optimizer in self.optimizers:
            optimizer.step()
        # Early on, an average over fewer steps: the first weights are not worth remembering.
        update_ema(self.ema, self.task.module, decay=min(self._loop.ema_decay, (1 + self.step) / (10 + self.step)))

    def _count_skipped(self) -> None:
        self._skipped_in_a_row += 1
        self._reporter.warn(f"step {self.step}: loss or gradient is not finite, the step is skipped")
        if self._skipped_in_a_row == _MAX_SKIPPED_IN_A_ROW:
            raise OsoraError(
                f"loss or gradient was not finite {_MAX_SKIPPED_IN_A_ROW} steps in a row, up to step {self.step}",
                hint="--resume from the last checkpoint with a lower rate: --set optimizer.learning_rate=X",
            )

    def _log(self, window: _Window) -> None:
        line = window.line(step=self.step, learning_rate=self.optimizers[0].param_groups[0]["lr"])
        path = self._output / LOG_FILE
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        self._reporter.note("  ".join(f"{name} {value:.5g}" for name, value in line.items()))

    def save(self) -> None:
        """Write the checkpoint.

        Raises:
            OutputError: that is not possible.
        """
        state = {
            "step": self.step,
            "model": self.task.module.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        with atomic_path(self._output / CHECKPOINT_FILE) as temporary:
            write_state(temporary, state)

    def resume(self) -> None:
        """Take up the checkpoint in the output folder, and take out of the log what came after it.

        Rates and other settings are those of this run, so that they may be changed on the way.

        Raises:
            CheckpointError: it is missing, broken, or of another model.
            RequestError: it is further on than this run is to go.
        """
        path = self._output / CHECKPOINT_FILE
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            self.task.module.load_state_dict(state["model"])
            self.ema.load_state_dict(state["ema"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                load_moments(optimizer, saved)
            self.step = int(state["step"])
        except _BROKEN as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"{path} cannot be resumed from: {first_line}", hint="begin anew with another --set output=FOLDER"
            ) from error
        if self.step > self._loop.steps:
            raise RequestError(f"loop.steps={self._loop.steps} is over already: {path} is of step {self.step}")
        self._shorten_log()

    def _shorten_log(self) -> None:
        path = self._output / LOG_FILE
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = "".join(line for line in lines if _step_of(line) <= self.step)
            write_bytes_atomic(path, kept.encode())


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return float("inf")  # half a line, from a crash


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
