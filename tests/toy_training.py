"""A task of a dozen weights, which can go wrong at chosen micro-batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.batches import SampledBatches, SampleRng
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.trainer import Clock, Losses, Role, Task, Trainer
from opensora_cli.settings.train_sections import Compute, LoopSettings, OptimizerSettings

ADAMW = OptimizerSettings(warmup_steps=2, decay_steps=2)
MUON = OptimizerSettings(name="muon", warmup_steps=2, decay_steps=2, muon_learning_rate=1e-2)


class ToyModule(nn.Module):
    """Has a matrix for Muon, other weights for AdamW, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Linear(3, 3)
        self.out = nn.Linear(3, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(self.block(x))


@dataclass(frozen=True)
class ToyBatch:
    """Inputs, and what they are called."""

    number: int
    x_BC: Tensor

    @property
    def paths(self) -> tuple[str, ...]:
        return (f"toy{self.number}.mp4",)


def toy_adversary() -> dict[str, Role]:
    """Return the role of a module that learns to answer 0 to the toy's answers."""
    torch.manual_seed(1)
    rate = OptimizerSettings(learning_rate=0.1, warmup_steps=0, max_grad_norm=100.0, weight_decay=0.1)
    return {"adversary": Role(nn.Linear(1, 1), rate)}


class ToyTask(Task):
    """Learns the sum of its inputs, with a new phase at step 2.

    Args:
        not_finite: numbers of micro-batches whose loss is not finite.
        steep: likewise the gradient, with a finite loss.
        opposed_from: first step of an adversary. None means that there is none.
    """

    def __init__(
        self, *, not_finite: tuple[int, ...] = (), steep: tuple[int, ...] = (), opposed_from: int | None = None
    ) -> None:
        super().__init__(ToyModule(), roles={} if opposed_from is None else toy_adversary())
        self._opposed_from = opposed_from
        self.asked: list[int] = []
        self.sampled: list[float] = []
        self.step = -1
        self.answer: Tensor | None = None
        self._not_finite = not_finite
        self._steep = steep

    def begin_step(self, step: int) -> None:
        self.step = step
        if step == 2:
            with torch.no_grad():
                if "out.bias" in (state := self.module.state_dict()):
                    state["out.bias"].fill_(0.5)

    def loss(self, batch: ToyBatch, rng: SampleRng) -> tuple[Tensor, dict[str, float]]:
        self.asked.append(batch.number)
        self.sampled.append(float(rng.numpy.uniform()))
        noise = 0.01 * torch.randn(batch.x_BC.shape, generator=rng.torch)
        answer = self.forward(batch.x_BC + noise)
        self.answer = answer.detach()
        loss = (answer - batch.x_BC.sum(dim=1, keepdim=True)).square().mean()
        if batch.number in self._not_finite:
            # Sums of both infinities have no value. The gradient stays finite.
            loss = loss + float("inf") * (-1) ** batch.number
        if batch.number in self._steep:
            loss = loss + (answer * 0).abs().sqrt().sum()
        return loss, {"scale": float(batch.x_BC.std())}

    def losses(self, batch: ToyBatch, rng: SampleRng) -> Losses:
        yield from super().losses(batch, rng)
        if self._opposed_from is not None and self.step >= self._opposed_from:
            assert self.answer is not None
            yield "adversary", self.roles["adversary"].forward(self.answer).square().mean(), {"opposed": 1.0}

    def tokens(self, batch: ToyBatch) -> int:
        return 10 * len(batch.x_BC)

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        torch.save(dict(weights), folder / "exported.pt")


class Listener(SilentReporter):
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def draw(rng: SampleRng, number: int) -> ToyBatch:
    """Return four inputs."""
    return ToyBatch(number, torch.randn(4, 3, generator=rng.torch))


def new_trainer(
    task: Task,
    batches: SampledBatches,
    *,
    optimizer: OptimizerSettings,
    distribution: Distribution | None = None,
    compute: Compute = Compute.FP32,
    trained_only: bool = False,
    **loop: object,
) -> Trainer:
    """Return the trainer of a task that is divided already; `loop` are settings of that section."""
    return Trainer(
        task,
        batches,
        loop=LoopSettings.model_validate({"ema_decay": 0.9, **loop}),
        optimizer=optimizer,
        compute=compute,
        distribution=distribution or Distribution(torch.device("cpu")),
        clock=Clock(),
        trained_only=trained_only,
    )


def toy_trainer(
    task: ToyTask,
    *,
    optimizer: OptimizerSettings = ADAMW,
    distribution: Distribution | None = None,
    seed: int = 0,
    steps: int = 6,
    **options: Any,
) -> Trainer:
    """Return a trainer of the toy; `options` are those of `new_trainer`."""
    distribution = distribution or Distribution(torch.device("cpu"))
    task.shard(distribution)
    batches = SampledBatches(draw, seed=seed, rank=distribution.data_rank, ranks=distribution.data_ranks)
    options |= {"seed": seed, "steps": steps}
    return new_trainer(task, batches, optimizer=optimizer, distribution=distribution, **options)
