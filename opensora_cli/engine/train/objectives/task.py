"""Interfaces between the trainer and an objective: task, micro-batches and random states."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Generator, Tensor, nn

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.settings.train_loop import OptimizerSettings

# Independent streams of one seed.
_OF_LOSS = 0
_OF_DATA = 1


@dataclass(frozen=True, slots=True)
class SampleRng:
    """Random state of one micro-batch, for arrays and for tensors on the host."""

    numpy: np.random.Generator
    torch: Generator

    @classmethod
    def of(cls, seed: int, number: int) -> "SampleRng":
        """Return the state for the loss of a micro-batch: noise, time, condition mode, dropout.

        It depends only on the seed and on the micro-batch's number in the whole run, not on the number of ranks or on
        interruptions.
        """
        return cls._of(seed, number, _OF_LOSS)

    @classmethod
    def of_data(cls, seed: int, number: int) -> "SampleRng":
        """Return the state for the contents of a micro-batch, which depends on the same values as in `of`."""
        return cls._of(seed, number, _OF_DATA)

    @classmethod
    def _of(cls, seed: int, number: int, stream: int) -> "SampleRng":
        rng = np.random.default_rng((seed, number, stream))
        return cls(rng, Generator().manual_seed(int(rng.integers(2**31))))


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

    def samples(self, batch: Any) -> int:
        """Return the number of samples of the micro-batch."""
        return len(batch.paths)

    @abstractmethod
    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write weights for generation to the run's folder. Only the main rank calls this.

        `weights` are whole, on the host, by the names of the module's state: the average, or else the current weights.
        """


class SampledBatches:
    """Endless micro-batches, in one epoch, from `make(random state, number)`; they depend on the seed and number only.

    `rank` and `ranks` count data-parallel ranks.
    """

    epoch = 0

    def __init__(self, make: Callable[[SampleRng, int], Any], *, seed: int, rank: int = 0, ranks: int = 1) -> None:
        self._make = make
        self._seed = seed
        self._rank, self._ranks = rank, ranks
        self._handed_out = 0

    def next(self) -> Any:
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
