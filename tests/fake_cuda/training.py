"""Training, rehearsed: a step of the engine's own trainer as one rank, at full size, without weights or clips.

What is not the engine's own: captions are not encoded, and instead of the reducer of DistributedDataParallel, which is
C++ and takes no fake tensors, there is `FakeDistribution`, which exchanges nothing: the sums of gradients of `ddp` are
not rehearsed.
"""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fake_cuda.collectives import World
from fake_cuda.generation import LoggedReporter
from fake_cuda.guard import accelerator
from fake_cuda.log import Log, lines_of
from fake_cuda.session import rehearsal
from fake_cuda.tensors import moved
from tiny_weights import write_holes
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from opensora_cli.engine.components.architectures import autoencoder_on_meta, transformer_on_meta, vae_tiling
from opensora_cli.engine.encode.clips import EmptyPrompt, Encoders, frozen_dtype
from opensora_cli.engine.estimate.fake_tensors import give_fake_weights, repeat_calls
from opensora_cli.engine.train import build, estimate
from opensora_cli.engine.train import distribution as ranks
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.memory import plan_frozen_weights, streamed_weights
from opensora_cli.engine.train.objectives import find_objective, mmdit
from opensora_cli.engine.train.optimizer import zero_state
from opensora_cli.engine.train.stand_ins import FakeDistribution, random_text_encoders
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.settings.train import TrainSettings, load_train_settings

STEP = "a step"
MAY_WAIT = lines_of(Trainer.do_step)
"""Losses and norms, once an update, which depends on them."""


@dataclass(frozen=True, slots=True)
class Turn:
    log: Log
    device: torch.device
    settings: TrainSettings


def recipe(name: str, **changes: object) -> TrainSettings:
    """Return a packaged recipe; `section__key=value` changes it."""
    settings = load_train_settings(config=Path(name), overrides={}, environment={})
    return settings.replace({"device": "cuda", **{key.replace("__", "."): value for key, value in changes.items()}})


def with_weights(folder: Path, settings: TrainSettings) -> TrainSettings:
    """Return settings whose first weights are in a sparse file, which takes no disk: mapped, as those of a run are."""
    weights = transformer_on_meta(settings.model).state_dict()
    path = folder / f"{len(weights)}.safetensors"
    if not path.exists():
        write_holes(path, weights, dtype="BF16")
    return settings.replace({"init": str(path)})


def rehearse(settings: TrainSettings, world: World | None = None, rank: int = 0) -> Turn:
    """Be one rank of a training for a step of two micro-batches of the largest shape, with moments of earlier steps."""
    world = world or World()
    if rank and not world.said:
        # What it is told by rank 0, which is not looked at otherwise.
        with rehearsal(world) as first, ranks.joined_ranks(settings, first.context):
            pass
    with _disable_current_modes():
        frozen = plan_frozen_weights(settings)
    with rehearsal(world, rank) as turn, ExitStack() as stack:
        stack.enter_context(accelerator(turn.queues))
        # One fake mode does not serve several threads.
        stack.enter_context(mock.patch.object(mmdit, "ThreadPoolExecutor", return_value=None))
        rehearsed = partial(ranks.distribution_of, kind=_Rehearsed)
        stack.enter_context(mock.patch.object(ranks, "distribution_of", rehearsed))
        distribution = Distribution(turn.device)
        if world.size > 1:
            settings, distribution = stack.enter_context(ranks.joined_ranks(settings, turn.context))
        reporter = LoggedReporter(turn.log)
        trainer = estimate._trainer(settings, _task(settings, distribution, reporter), distribution)
        for learner in trainer.learners.values():
            for _, weight, optimizer in learner.trained():
                optimizer.state[weight] = zero_state(optimizer, weight)
        module = trainer.task.module
        stack.enter_context(streamed_weights(module, frozen, settings, device=turn.device, reporter=reporter))
        with reporter.stage(STEP):
            trainer.step = find_objective(settings).measured_steps(settings)[-1]
            trainer.do_step()
            reporter.advance()
        return Turn(turn.log, turn.device, settings)


class _Rehearsed(FakeDistribution):
    """Exchanges nothing between whole copies of weights, and everything between divided ones."""

    def replicate(self, module: nn.Module, trained: Collection[nn.Parameter]) -> nn.Module:
        return super().replicate(moved(module, self.device, leaves_frozen=True), trained)

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        return Distribution.mean(self, values) if self.divides else super().mean(values)

    def any(self, flag: bool) -> bool:
        return Distribution.any(self, flag) if self.divides else super().any(flag)


def _task(settings: TrainSettings, distribution: Distribution, reporter: LoggedReporter) -> Any:
    attention = partial(build.plan_attention, tries_device=False)
    clips: Any = _Cache(settings) if settings.train_mmdit.cache is not None else None
    with (
        mock.patch.object(build, "plan_attention", attention),
        mock.patch.object(mmdit, "load_encoders", _encoders),
    ):
        return build.build_task(settings, distribution=distribution, clips=clips, reporter=reporter)


@dataclass(frozen=True, slots=True)
class _Cache:
    """Stands in for a cache of encoded clips; those of the micro-batches are `largest_batches`'."""

    settings: TrainSettings

    def empty_prompt(self) -> EmptyPrompt:
        text, model = self.settings.text, self.settings.model
        return EmptyPrompt(torch.zeros(text.t5_max_length, model.context_in_dim), torch.zeros(model.vec_in_dim))


def _encoders(settings: TrainSettings, *, device: torch.device) -> Encoders:
    """Return the frozen parts on the device, the text encoders of which are there and encode nothing."""
    dtype, empty = frozen_dtype(settings.train_mmdit, device), partial(torch.zeros, device=device)
    with _disable_current_modes(), torch.device("meta"):
        vae = autoencoder_on_meta(settings.vae)
        texts = random_text_encoders(settings)
    frozen = nn.ModuleList([vae, *texts]).requires_grad_(False).eval()
    give_fake_weights(frozen, device=device, dtype=dtype)
    repeat_calls(vae.encoder)
    length, model = settings.text.t5_max_length, settings.model

    def t5(captions: list[str]) -> torch.Tensor:
        assert len(texts) == 2  # they are held here
        return empty(len(captions), length, model.context_in_dim)

    return Encoders(
        vae,
        t5=t5,
        clip=lambda captions: empty(len(captions), model.vec_in_dim),
        device=device,
        dtype=dtype,
        tiling=vae_tiling(settings.vae),
    )
