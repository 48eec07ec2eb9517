"""A small transformer trained by each strategy: a plain loop over a distribution, and what it holds and sends."""

from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from tiny_transformer import inputs, transformer
from torch import Tensor

from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.batches import SampledBatches
from opensora_cli.engine.bench_comm.measure import counted_bytes
from opensora_cli.engine.encode.loading import open_batches
from opensora_cli.engine.train.build import build_task
from opensora_cli.engine.train.distribution import Distribution, local, mesh_shape
from opensora_cli.engine.train.objectives.base import Task
from opensora_cli.engine.train.trainer import Clock, Trainer
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.mesh import ParallelMesh, use_mesh
from opensora_cli.settings.devices import Strategy, TrainParallelSettings
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_loop import Compute, LoopSettings, OptimizerSettings

MAX_NORM = 2.5
LATENT_TOKENS, TEXT_TOKENS, BATCH = 7, 4, 2


@dataclass(frozen=True)
class Case:
    """A strategy, and how many ranks share what."""

    strategy: str
    ranks: int
    degrees: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        """Return a name for a test."""
        shared = (f"{name.removesuffix('_degree')}{degree}" for name, degree in self.degrees)
        return "-".join((self.strategy, str(self.ranks), *shared))

    @property
    def parallel(self) -> TrainParallelSettings:
        """The settings of that name."""
        return TrainParallelSettings.model_validate({"gpus": self.ranks, **dict(self.degrees)})

    @property
    def micro_batches(self) -> int:
        """Of an update: fewer where ranks share each of them, since all of them are computed one after the other."""
        return 2 if self.strategy == "hybrid" else 4

    def open(
        self, dtype: torch.dtype | None = None, device: str = "cpu", *, offload_states: bool = False
    ) -> Distribution:
        """Return the distribution of this process."""
        strategy = Strategy(self.strategy)
        mesh = ParallelMesh(mesh_shape(strategy, self.parallel), device_type=device)
        use_mesh(mesh)
        return Distribution(torch.device(device), mesh, strategy=strategy, dtype=dtype, offload_states=offload_states)


def open_trainer(settings: TrainSettings, distribution: Distribution) -> Trainer:
    """Return the trainer of a run, as `osora train` builds it."""
    reporter = SilentReporter()
    return Trainer(
        build_task(settings, distribution=distribution, reporter=reporter),
        open_batches(settings, data_rank=distribution.data_rank, data_ranks=distribution.data_ranks, reporter=reporter),
        loop=settings.loop,
        optimizer=settings.optimizer,
        compute=settings.precision.compute,
        distribution=distribution,
        clock=Clock(),
        reporter=reporter,
    )


@dataclass(frozen=True)
class NumberedBatch:
    """Micro-batch that has only its number."""

    number: int
    paths: tuple[str, ...] = ("clip",)


def train_task(
    task: Task, distribution: Distribution, *, steps: int
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train a sharded task with four micro-batches a step. Return the figures of each step, and the whole weights."""
    trainer = Trainer(
        task,
        SampledBatches(
            lambda rng, number: NumberedBatch(number),
            seed=0,
            rank=distribution.data_rank,
            ranks=distribution.data_ranks,
        ),
        loop=LoopSettings(steps=steps, micro_batches=4, ema_decay=0.9),
        optimizer=OptimizerSettings(learning_rate=1e-2, warmup_steps=0, eps=1e-3),
        compute=Compute.FP32,
        distribution=distribution,
        clock=Clock(),
        reporter=SilentReporter(),
        trained_only=True,
    )
    figures = [dict(trainer.do_step().figures) for _ in range(steps)]
    weights = task.module.named_parameters()
    return figures, {
        distribution.whole_name(name): distribution.whole(name, weight).clone() for name, weight in weights
    }


def tiny_transformer(*, hidden: int = 40, heads: int = 5, mlp_ratio: float = 0.625) -> MMDiT:
    """Return a transformer whose heads, features and rows two or four ranks cannot divide evenly."""
    return transformer(depth=1, single=1, hidden=hidden, heads=heads, mlp_ratio=mlp_ratio)


def micro_batch(model: MMDiT, number: int, *, latent_tokens: int = LATENT_TOKENS) -> tuple[dict[str, Tensor], Tensor]:
    """Return the arguments of a forward pass, latents first, and the velocity to learn."""
    given = inputs(model, batch=BATCH, tokens=latent_tokens, text=TEXT_TOKENS, seed=number)
    generator = torch.Generator().manual_seed(10_000 + number)
    return given, torch.randn(given["packed_latents_BND"].shape, generator=generator)


@dataclass
class Run:
    """A training run, step by step."""

    distribution: Distribution
    model: MMDiT
    micro_batches: int
    compute: Compute = Compute.FP32
    latent_tokens: int = LATENT_TOKENS
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Divide the model, and make the optimizer of what is left of it."""
        self.forward = self.distribution.shard(self.model)
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)

    def find_gradient(self) -> None:
        """Compute the gradient of the next update, clipped."""
        ranks, step = self.distribution.data_ranks, len(self.losses)
        first = step * self.micro_batches
        own = range(first + self.distribution.data_rank, first + self.micro_batches, ranks)
        loss_of_rank = 0.0
        self.optimizer.zero_grad()
        for number in own:
            given, target = micro_batch(self.model, number, latent_tokens=self.latent_tokens)
            given = {name: value.to(self.distribution.device) for name, value in given.items()}
            latents = given.pop("packed_latents_BND")
            with self.distribution.accumulating(last=number == own[-1]):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.compute is Compute.BF16):
                    loss = (self.forward(latents, **given).float() - target.to(latents.device)).square().mean()
                (loss / len(own)).backward()
            loss_of_rank += loss.item() / len(own)
        self.norms.append(self.distribution.clip_grad_norm(dict(self.model.named_parameters()), MAX_NORM).item())
        self.losses.append(self.distribution.mean({"loss": loss_of_rank})["loss"])

    def step(self, count: int = 1) -> None:
        """Do some updates."""
        for _ in range(count):
            self.find_gradient()
            self.optimizer.step()

    def held_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of weights, gradients and moments that this rank holds."""
        weights = [local(weight) for weight in self.model.parameters()]
        gradients = [local(weight.grad) for weight in self.model.parameters() if weight.grad is not None]
        moments = [
            local(value)
            for state in self.optimizer.state.values()
            for name, value in state.items()
            if name in ("exp_avg", "exp_avg_sq")
        ]
        return _bytes(weights), _bytes(gradients), _bytes(moments)

    def sent_bytes(self) -> int:
        """Return what this rank sends in an update but for the mean of the losses."""
        with patch.object(self.distribution, "mean", dict), counted_bytes() as sent:
            self.find_gradient()
        return sent.num_bytes

    def whole(self) -> dict[str, Tensor]:
        """Return the weights of the whole model, by their names there."""
        distribution = self.distribution
        return {
            distribution.whole_name(name): distribution.whole(name, weight).clone()
            for name, weight in self.model.named_parameters()
        }


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class Figures:
    """Of a rank in training, which looks at another batch after each of its first updates."""

    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    weights: dict[str, Tensor]
    """The whole ones, in the end."""
    held_bytes: tuple[int, int, int]
    """Of weights, gradients and moments."""
    held_after_evaluating: set[int]
    sent_bytes: int


def figures(distribution: Distribution, micro_batches: int, steps: int) -> Figures:
    """Train for some steps."""
    run = Run(distribution, tiny_transformer(), micro_batches)
    evaluated, held = [], set()
    for step in range(steps):
        run.step()
        if step < 3:
            given, target = micro_batch(run.model, 999)
            with torch.no_grad(), distribution.evaluating():
                velocity = run.forward(given.pop("packed_latents_BND"), **given)
            evaluated.append((velocity - target).square().mean().item())
            held.add(sum(local(weight).nbytes for weight in run.model.parameters()))
    losses, norms, whole = [*run.losses], [*run.norms], run.whole()
    sent = run.sent_bytes()
    return Figures(losses, norms, evaluated, whole, run.held_bytes(), held, sent)
