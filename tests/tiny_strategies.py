"""Strategies of training, and a small transformer that learns random velocities by each of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_transformer import inputs, transformer
from torch import Tensor
from toy_training import new_trainer

from opensora_cli.data.batches import SampledBatches, SampleRng
from opensora_cli.engine.train.distribution import Distribution, mesh_shape
from opensora_cli.engine.train.trainer import Task, Trainer
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.mesh import ParallelMesh, use_mesh
from opensora_cli.settings.devices import Strategy, TrainParallelSettings
from opensora_cli.settings.train_sections import OptimizerSettings

LATENT_TOKENS, TEXT_TOKENS, BATCH = 7, 4, 2
OPTIMIZER = OptimizerSettings(learning_rate=1e-3, warmup_steps=0, max_grad_norm=2.5)


@dataclass(frozen=True)
class Case:
    """Strategy, and the number of ranks along each axis."""

    strategy: str
    ranks: int
    degrees: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        shared = (f"{name.removesuffix('_degree')}{degree}" for name, degree in self.degrees)
        return "-".join((self.strategy, str(self.ranks), *shared))

    @property
    def parallel(self) -> TrainParallelSettings:
        return TrainParallelSettings.model_validate({"gpus": self.ranks, **dict(self.degrees)})

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an update: fewer for ranks that share each of them and compute all in turn."""
        return 2 if self.strategy == "hybrid" else 4

    def open(
        self, dtype: torch.dtype | None = None, device: str = "cpu", *, offload_states: bool = False
    ) -> Distribution:
        strategy = Strategy(self.strategy)
        mesh = ParallelMesh(mesh_shape(strategy, self.parallel), device_type=device)
        use_mesh(mesh)
        return Distribution(torch.device(device), mesh, strategy=strategy, dtype=dtype, offload_states=offload_states)


def cases(fast: Iterable[Case], slow: Iterable[Case] = ()) -> pytest.MarkDecorator:
    """Parametrize a test by cases, of which some are for the slow tier."""
    marked = [*(pytest.param(case) for case in fast), *(pytest.param(case, marks=pytest.mark.slow) for case in slow)]
    return pytest.mark.parametrize("case", marked, ids=str)


def open_case(case: Case | None) -> Distribution:
    return case.open() if case else Distribution(torch.device("cpu"))


def tiny_transformer(*, hidden: int = 40, heads: int = 5, mlp_ratio: float = 0.625) -> MMDiT:
    """Return a transformer whose heads, features and rows two or four ranks cannot divide evenly."""
    return transformer(depth=1, single=1, hidden=hidden, heads=heads, mlp_ratio=mlp_ratio)


def micro_batch(model: MMDiT, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the arguments of a forward pass, latents first, and the velocity to learn."""
    given = inputs(model, batch=BATCH, tokens=LATENT_TOKENS, text=TEXT_TOKENS, seed=number)
    generator = torch.Generator().manual_seed(10_000 + number)
    return given, torch.randn(given["packed_latents_BND"].shape, generator=generator)


@dataclass(frozen=True)
class NumberedBatch:
    """Micro-batch that has only its number."""

    number: int
    paths: tuple[str, ...] = ("clip",)


class VelocityTask(Task):
    """Task of random velocities, which depend on the number of the micro-batch."""

    def loss(self, batch: NumberedBatch, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        given, target = micro_batch(self.module, batch.number)
        device = next(self.module.parameters()).device
        given = {name: value.to(device) for name, value in given.items()}
        velocity = self.forward(given.pop("packed_latents_BND"), **given)
        return (velocity.float() - target.to(device)).square().mean(), {}

    def tokens(self, batch: NumberedBatch) -> int:
        return 1

    def export(self, weights: object, folder: Path) -> None:
        raise NotImplementedError


def numbered_trainer(
    task: Task, distribution: Distribution, *, optimizer: OptimizerSettings = OPTIMIZER, **options: object
) -> Trainer:
    """Divide a task, and return its trainer; `options` are those of `new_trainer`."""
    task.shard(distribution)
    own = {"rank": distribution.data_rank, "ranks": distribution.data_ranks}
    batches = SampledBatches(lambda rng, number: NumberedBatch(number), seed=0, **own)
    return new_trainer(task, batches, optimizer=optimizer, distribution=distribution, **options)


def whole_weights(trainer: Trainer, weights: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the weights of the whole model by their names there, or other tensors with the names of this rank's."""
    distribution = trainer.distribution
    return {
        distribution.whole_name(name): distribution.whole(name, weight).clone()
        for name, weight in (weights or dict(trainer.task.module.named_parameters())).items()
    }


@dataclass(frozen=True)
class Learned:
    """Figures of a rank, which also evaluates after each of its first updates, and saves after the second."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    """Whole weights at the end."""
    averages: dict[str, Tensor]
    evaluated: list[float]
    held_bytes: tuple[int, int, int]
    """Bytes of weights, gradients and moments."""
    held_after_evaluating: set[int]
    sent_bytes: int
    share: int
    """Bytes of this rank's rows and features of the weights."""
    saved: Path


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if (ours[name] - theirs[name]).abs().max() > tolerance] == []
