"""What the trainer needs of an objective: a task, its micro-batches, and where their randomness comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.settings.train_loop import OptimizerSettings

# Streams of one seed that must not resemble each other.
_OF_LOSS = 0
_OF_DATA = 1


@dataclass(frozen=True, slots=True)
class Chance:
    """Where the randomness of one micro-batch comes from, for arrays and for tensors on the host."""

    rng: np.random.Generator
    generator: torch.Generator

    @classmethod
    def of(cls, seed: int, number: int) -> "Chance":
        """Return what the loss of a micro-batch draws from: noise, time, condition mode, dropout.

        It depends on nothing but the seed and the micro-batch's number in the whole run, and so neither on the number
        of processes nor on whether the run was interrupted.
        """
        return cls._of(seed, number, _OF_LOSS)

    @classmethod
    def of_data(cls, seed: int, number: int) -> "Chance":
        """Return what the contents of a micro-batch, or of a procedural clip, are drawn from; as `of`."""
        return cls._of(seed, number, _OF_DATA)

    @classmethod
    def _of(cls, seed: int, number: int, stream: int) -> "Chance":
        rng = np.random.default_rng((seed, number, stream))
        return cls(rng, torch.Generator().manual_seed(int(rng.integers(2**31))))


class Batch(Protocol):
    """One micro-batch."""

    @property
    def number(self) -> int:
        """Its number in the whole run, over all ranks and epochs; from 0."""

    @property
    def paths(self) -> tuple[str, ...]:
        """What each of its samples is called, for the log of skipped steps."""


BatchT = TypeVar("BatchT", bound=Batch)
BatchT_co = TypeVar("BatchT_co", bound=Batch, covariant=True)
BatchT_contra = TypeVar("BatchT_contra", bound=Batch, contravariant=True)


class BatchSource(Protocol[BatchT_co]):
    """Gives this rank its micro-batches: of R data-parallel ranks, the one of rank r gets r, r+R, r+2R and so on."""

    @property
    def epoch(self) -> int:
        """Of the micro-batch that was handed out last, or of the first; from 0."""

    def next(self) -> BatchT_co:
        """Return this rank's next micro-batch; there is always one."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the run is: after what was handed out, whatever was fetched ahead.

        It is taken between updates only, when all ranks have had equally many, and does not depend on their number.
        Plain values and tensors.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            CheckpointError: the state is of other data.
        """

    def close(self) -> None:
        """End workers; may come twice."""


class Adversary(Protocol):
    """A module that learns against the task's own, as a discriminator does."""

    forward: Callable[..., Any]
    """What is called in place of `module`; as `Task.forward`."""

    @property
    def module(self) -> nn.Module:
        """What is updated and saved."""

    @property
    def optimizer(self) -> OptimizerSettings:
        """How to update it."""

    def loss(self) -> tuple[Tensor, dict[str, float]] | None:
        """Return its loss on what the task's `loss` has just computed, and figures for the log.

        None: it does not learn in this step, which is so on all ranks.
        """


class Task(Protocol[BatchT_contra]):
    """One thing to train."""

    forward: Callable[..., Any]
    """What `loss` calls in place of `module`: first the module itself, then what the strategy puts here."""

    @property
    def module(self) -> nn.Module:
        """What is updated, averaged and saved; it may be sharded in place before training."""

    @property
    def adversary(self) -> Adversary | None:
        """What learns against it, with an optimizer of its own."""

    def begin_step(self, step: int, ema: Mapping[str, Tensor] | None) -> None:
        """Rework the weights and their average, in place, where a new phase of training begins.

        May come twice for the same step, after an interruption or a resume: the second time must change nothing.

        Args:
            step: updates that are done.
            ema: averaged weights by the names of the module's state, this rank's parts; None: there is no average.
        """

    def loss(self, batch: BatchT_contra, chance: Chance) -> tuple[Tensor, dict[str, float]]:
        """Return the mean loss over the samples of a micro-batch, and figures for the log (of this rank)."""

    def tokens(self, batch: BatchT_contra) -> int:
        """Return how many tokens (of captions or of packed latents) the micro-batch has."""

    def samples(self, batch: BatchT_contra) -> int:
        """Return how many samples the micro-batch has."""

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write weights in the form that generating reads; by the main rank alone.

        Args:
            weights: the averaged ones, or the current ones without an average: whole, on the host, by the names of the
                module's state.
            folder: the run's.
        """


class DrawnBatches(Generic[BatchT]):
    """Gives micro-batches that depend on the seed and their number alone; there is one epoch.

    Args:
        draw: (chance, number) -> micro-batch.
        seed: of the run.
        rank: this data-parallel rank.
        ranks: how many of them there are.
    """

    def __init__(self, draw: Callable[[Chance, int], BatchT], *, seed: int, rank: int = 0, ranks: int = 1) -> None:
        self._draw = draw
        self._seed = seed
        self._rank, self._ranks = rank, ranks
        self._handed_out = 0

    @property
    def epoch(self) -> int:
        """Always the first."""
        return 0

    def next(self) -> BatchT:
        """Return this rank's next micro-batch."""
        number = self._handed_out + self._rank
        self._handed_out += self._ranks
        return self._draw(Chance.of_data(self._seed, number), number)

    def state_dict(self) -> dict[str, Any]:
        """Return how many micro-batches all ranks have had together."""
        return {"handed_out": self._handed_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after so many.

        Raises:
            CheckpointError: the state is of other data.
        """
        handed_out = state_dict.get("handed_out")
        if not isinstance(handed_out, int) or state_dict.keys() != {"handed_out"}:
            raise CheckpointError(
                "the checkpoint's place in the data is of another dataset", hint="use the `data` that it was trained on"
            )
        self._handed_out = handed_out

    def close(self) -> None:
        """Do nothing: there are no workers."""
