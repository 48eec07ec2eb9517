"""The training loop that all targets share: step, average, log, checkpoint, resume."""

import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from opensora_cli.core.exceptions import CheckpointError, OsoraError
from opensora_cli.core.files import atomic_path
from opensora_cli.core.progress import Reporter
from opensora_cli.settings.train import LoopSettings, OptimizerName, OptimizerSettings

CHECKPOINT_NAME = "checkpoint.pt"
LOG_NAME = "log.jsonl"
_MAX_SKIPPED_IN_A_ROW = 5


class Task(Protocol):
    """One thing to train."""

    module: nn.Module
    """What is updated, averaged and exported."""

    def loss(self, step: int, rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a fresh batch, and figures for the log. All chance comes from `rng`."""

    def export(self, ema: nn.Module, folder: Path) -> None:
        """Write the averaged weights in the form that generating reads."""


@dataclass
class _Averages:
    """Sums since the last line of the log."""

    started: float
    steps: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        self.sums: dict[str, float] = {}

    def add(self, figures: dict[str, float]) -> None:
        self.steps += 1
        for name, value in figures.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def line(self, *, step: int, learning_rate: float) -> dict[str, float]:
        seconds = time.perf_counter() - self.started
        counted = max(self.steps, 1)
        means = {name: round(total / counted, 6) for name, total in self.sums.items()}
        done = self.steps + self.skipped
        return {
            "step": step,
            **means,
            "learning_rate": learning_rate,
            "seconds_per_step": round(seconds / max(done, 1), 4),
            "skipped": self.skipped,
        }


def update_ema(ema_model: nn.Module, model: nn.Module, decay: float) -> None:
    """Move the averaged weights towards the current ones: ema = decay * ema + (1 - decay) * weight, in place.

    Args:
        ema_model: the averaged copy, of the same structure.
        model: the model in training.
        decay: 0 to 1; 1 leaves the average as it is.
    """
    with torch.no_grad():
        averaged = [value for value in ema_model.state_dict().values() if value.is_floating_point()]
        current = [value.to(torch.float32) for value in model.state_dict().values() if value.is_floating_point()]
        torch._foreach_lerp_(averaged, current, 1.0 - decay)


def rate_factor(step: int, *, steps: int, warmup_steps: int, decay_steps: int) -> float:
    """Return the share of the full learning rate at `step`: up linearly, level, and down to zero linearly."""
    up = (step + 1) / warmup_steps if step < warmup_steps else 1.0
    down = (steps - step) / decay_steps if step >= steps - decay_steps else 1.0
    return min(up, down)


def build_optimizers(module: nn.Module, settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
    """Return the optimizers that together update every weight once."""
    trained = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    matrices: list[nn.Parameter] = []
    if settings.name is OptimizerName.MUON:
        # Orthogonalised updates suit matrices between hidden layers, not those at the model's inputs and outputs.
        matrices = [weight for name, weight in trained if weight.ndim >= 2 and "block" in name]
    inner = {id(weight) for weight in matrices}
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [weight for _, weight in trained if id(weight) not in inner],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
    ]
    if matrices:
        optimizers.append(
            KernelMuon(matrices, learning_rate=settings.muon_learning_rate, weight_decay=settings.weight_decay)
        )
    return optimizers


class KernelMuon(torch.optim.Muon):
    """Muon (Jordan et al. 2024) for convolutions too: a kernel is a matrix of outputs by inputs x taps.

    torch's own takes matrices only, so it is given flattened copies, which are filled and read back at each step.
    """

    def __init__(self, weights: list[nn.Parameter], *, learning_rate: float, weight_decay: float) -> None:
        self._weights = weights
        self._matrices = [nn.Parameter(weight.detach().flatten(1).clone()) for weight in weights]
        super().__init__(
            self._matrices, lr=learning_rate, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients."""
        for weight, matrix in zip(self._weights, self._matrices, strict=True):
            matrix.copy_(weight.flatten(1))
            matrix.grad = None if weight.grad is None else weight.grad.flatten(1)
        super().step(closure)
        for weight, matrix in zip(self._weights, self._matrices, strict=True):
            weight.copy_(matrix.view(weight.shape))
            weight.grad = None


class Trainer:
    """Trains a task, from the start or from its newest checkpoint.

    Each step draws its chance from its own number and the seed, so that a resumed run sees the batches that an
    uninterrupted one would have seen.
    """

    def __init__(
        self, task: Task, *, loop: LoopSettings, optimizer: OptimizerSettings, output: Path, reporter: Reporter
    ) -> None:
        self.task = task
        self._loop = loop
        self._settings = optimizer
        self._output = output
        self._reporter = reporter
        self.optimizers = build_optimizers(task.module, optimizer)
        for built in self.optimizers:
            for group in built.param_groups:
                group["full_lr"] = group["lr"]
        self.ema = _frozen_copy(task.module)
        self.step = 0

    def run(self) -> None:
        """Train to the last step, then export. An interrupt leaves a checkpoint and is raised again."""
        self._output.mkdir(parents=True, exist_ok=True)
        averages = _Averages(started=time.perf_counter())
        skipped_in_a_row = 0
        try:
            with self._reporter.stage("train", total=self._loop.steps, unit="step") as progress:
                progress.advance(self.step)
                while self.step < self._loop.steps:
                    figures = self._update()
                    if figures is None:
                        averages.skipped += 1
                        skipped_in_a_row += 1
                        if skipped_in_a_row >= _MAX_SKIPPED_IN_A_ROW:
                            raise OsoraError(
                                f"the loss was not finite {skipped_in_a_row} steps in a row, up to step {self.step}",
                                hint="lower optimizer.learning_rate and resume from the checkpoint",
                            )
                    else:
                        averages.add(figures)
                        skipped_in_a_row = 0
                    self.step += 1
                    progress.advance()
                    if self.step % self._loop.log_every == 0:
                        self._log(averages)
                        averages = _Averages(started=time.perf_counter())
                    if self.step % self._loop.checkpoint_every == 0:
                        self.save()
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()
        self.task.export(self.ema, self._output)

    def _update(self) -> dict[str, float] | None:
        """Do one step; return its figures, or None if loss or gradient were not finite and nothing was updated."""
        rng = np.random.default_rng((self._loop.seed, self.step))
        torch.manual_seed(int(rng.integers(2**31)))
        factor = rate_factor(
            self.step,
            steps=self._loop.steps,
            warmup_steps=self._settings.warmup_steps,
            decay_steps=self._settings.decay_steps,
        )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * factor
            optimizer.zero_grad(set_to_none=True)
        device = next(self.task.module.parameters()).device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self._loop.autocast_bf16):
            loss, figures = self.task.loss(self.step, rng)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.task.module.parameters(), self._settings.max_grad_norm)
        if not bool(torch.isfinite(loss.detach() + norm)):
            self._reporter.warn(f"step {self.step}: loss or gradient is not finite, the step is skipped")
            return None
        for optimizer in self.optimizers:
            optimizer.step()
        decay = min(self._loop.ema_decay, (1 + self.step) / (10 + self.step))
        update_ema(self.ema, self.task.module, decay)
        return {"loss": float(loss.detach()), "grad_norm": float(norm), **figures}

    def _log(self, averages: _Averages) -> None:
        line = averages.line(step=self.step, learning_rate=self.optimizers[0].param_groups[0]["lr"])
        with (self._output / LOG_NAME).open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        self._reporter.note("  ".join(f"{name} {value:.5g}" for name, value in line.items()))

    def save(self) -> None:
        """Write the checkpoint: weights, averages, optimizers and the step."""
        state = {
            "step": self.step,
            "model": self.task.module.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        with atomic_path(self._output / CHECKPOINT_NAME) as temporary:
            torch.save(state, temporary)

    def resume(self) -> bool:
        """Take up the checkpoint in the output folder; return whether there was one.

        Raises:
            CheckpointError: it is broken, or of another model.
        """
        path = self._output / CHECKPOINT_NAME
        if not path.exists():
            return False
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            self.task.module.load_state_dict(state["model"])
            self.ema.load_state_dict(state["ema"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step = int(state["step"])
        except Exception as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(
                f"{path} cannot be resumed from: {first_line}", hint="give another --set output=FOLDER to start anew"
            ) from error
        return True


def _frozen_copy(module: nn.Module) -> nn.Module:
    frozen = copy.deepcopy(module)
    for weight in frozen.parameters():
        weight.requires_grad_(False)
    return frozen.eval()
