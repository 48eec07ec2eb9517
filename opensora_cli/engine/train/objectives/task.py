"""What the trainer needs of an objective: a task, its micro-batches, and where their randomness comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from torch import Generator, Tensor, nn

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.settings.train_loop import OptimizerSettings

# Independent streams of one seed.
_OF_LOSS = 0
_OF_DATA = 1


@dataclass(frozen=True, slots=True)
class SampleRng:
    """The random state of one micro-batch: for arrays, and for tensors on the host."""

    numpy: np.random.Generator
    torch: Generator

    @classmethod
    def of(cls, seed: int, number: int) -> "SampleRng":
        """Return the state for the loss of a micro-batch: noise, time, condition mode, dropout.

        It depends on the seed and on the micro-batch's number in the whole run alone, not on the number of ranks, nor
        on whether the run was interrupted.
        """
        return cls._of(seed, number, _OF_LOSS)

    @classmethod
    def of_data(cls, seed: int, number: int) -> "SampleRng":
        """Return the state for the contents of a micro-batch; as `of`."""
        return cls._of(seed, number, _OF_DATA)

    @classmethod
    def _of(cls, seed: int, number: int, stream: int) -> "SampleRng":
        rng = np.random.default_rng((seed, number, stream))
        return cls(rng, Generator().manual_seed(int(rng.integers(2**31))))


class Batch(Protocol):
    """One micro-batch."""

    @property
    def number(self) -> int:
        """Its number in the whole run, over all ranks and epochs; from 0."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Names of its samples, for the log of skipped steps."""


BatchT = TypeVar("BatchT", bound=Batch)
BatchT_co = TypeVar("BatchT_co", bound=Batch, covariant=True)
BatchT_contra = TypeVar("BatchT_contra", bound=Batch, contravariant=True)


class BatchSource(Protocol[BatchT_co]):
    """This rank's micro-batches: of R data-parallel ranks, rank r gets r, r+R, r+2R and so on."""

    @property
    def epoch(self) -> int:
        """Of the latest micro-batch, or of the first; from 0."""

    def next(self) -> BatchT_co:
        """Return this rank's next micro-batch; there is always one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, without what was prefetched: plain values and tensors.

        It is taken between updates only, when all ranks have had equally many, and does not depend on their number.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there. Raises CheckpointError if the state is of other data."""

    def close(self) -> None:
        """End workers; may be called twice."""


class Adversary(Protocol):
    """A module that learns against the task's own, as a discriminator does."""

    forward: Callable[..., Any]
    """Called in place of `module`; as `Task.forward`."""

    @property
    def module(self) -> nn.Module:
        """Updated and saved."""

    @property
    def optimizer(self) -> OptimizerSettings:
        """Settings of its optimizer."""

    def loss(self) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return its loss on what the task's `loss` has just computed, and figures for the log, detached.

        None: it does not learn in this step, on no rank.
        """


class Task(Protocol[BatchT_contra]):
    """One thing to train."""

    forward: Callable[..., Any]
    """`loss` calls it in place of `module`: the module itself, then what the strategy wraps it in."""

    @property
    def module(self) -> nn.Module:
        """Updated, averaged and saved; it may be sharded in place before training."""

    @property
    def adversary(self) -> Adversary | None:
        """A module that learns against it, with an optimizer of its own."""

    def begin_step(self, step: int) -> None:
        """Begin a new phase of training, if there is one after `step` updates. A resumed run repeats the call."""

    def loss(self, batch: BatchT_contra, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss over the samples of a micro-batch, and figures for the log (of this rank), detached."""

    def tokens(self, batch: BatchT_contra) -> int:
        """Return how many tokens (of captions or of packed latents) the micro-batch has."""

    def samples(self, batch: BatchT_contra) -> int:
        """Return how many samples the micro-batch has."""

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write weights in the form that generation reads, into the run's folder; by the main rank alone.

        `weights` are whole, on the host, by the names of the module's state: the average, or the current ones without.
        """


class SampledBatches(Generic[BatchT]):
    """Endless micro-batches that depend on the seed and their number alone, by `make(random state, number)`; one epoch.

    `rank` and `ranks` are the data-parallel ones.
    """

    def __init__(self, make: Callable[[SampleRng, int], BatchT], *, seed: int, rank: int = 0, ranks: int = 1) -> None:
        self._make = make
        self._seed = seed
        self._rank, self._ranks = rank, ranks
        self._handed_out = 0

    @property
    def epoch(self) -> int:
        return 0

    def next(self) -> BatchT:
        number = self._handed_out + self._rank
        self._handed_out += self._ranks
        return self._make(SampleRng.of_data(self._seed, number), number)

    def state_dict(self) -> dict[str, Any]:
        return {"handed_out": self._handed_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        handed_out = state_dict.get("handed_out")
        if not isinstance(handed_out, int) or state_dict.keys() != {"handed_out"}:
            raise CheckpointError(
                "the checkpoint's place in the data is of another dataset", hint="use the `data` that it was trained on"
            )
        self._handed_out = handed_out

    def close(self) -> None:
        """Do nothing."""
