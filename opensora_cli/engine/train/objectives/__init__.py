"""Objectives of training by name.

The module of an objective has its name in `TARGETS` of the settings, and the class `OBJECTIVE`. No other module depends
on which objective a run has.
"""

from abc import abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Self

from torch import Tensor, nn

from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import ClipBatch
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.trainer import Task
from opensora_cli.settings.train import TrainSettings

if TYPE_CHECKING:
    from opensora_cli.engine.encode.clip_cache import ClipCache
    from opensora_cli.engine.train.memory import BatchShape

TokenWeights = Callable[[ClipBatch, tuple[int, int, int]], Tensor]
"""Function from a micro-batch, and frames, rows and columns of its tokens, to weights (B,N) of tokens in the loss."""


class Objective(Task):
    """Training task that is made from settings, and its sizes for plans and estimates."""

    @classmethod
    @abstractmethod
    def build(
        cls,
        settings: TrainSettings,
        *,
        distribution: Distribution,
        clips: "ClipCache | None",
        token_weights: TokenWeights | None,
        reporter: Reporter,
    ) -> Self:
        """Return the task with its first weights, or with a module on the meta device if `distribution` divides it.

        Weights without a file are random from torch's global generator.
        """

    @classmethod
    @abstractmethod
    def stand_in(cls, settings: TrainSettings) -> tuple[Self, list[nn.Module]]:
        """Return the task with random weights and its frozen parts, without any file, to measure or estimate a step."""

    @classmethod
    @abstractmethod
    def outline(cls, settings: TrainSettings) -> nn.Module:
        """Return the trained module on the meta device; frozen weights need no gradient.

        Raises RequestError if sizes contradict each other, and HardwareError if a library is missing.
        """

    @classmethod
    @abstractmethod
    def layer_values(cls, settings: TrainSettings, shape: "BatchShape") -> int:
        """Return the number of values in a layer of a micro-batch of this shape, in proportion to its memory."""

    @classmethod
    def evaluations(cls, settings: TrainSettings) -> float:
        """Return the mean number of evaluations without gradients in a step, beside its forward and backward pass."""
        return 0.0

    @classmethod
    def measured_steps(cls, settings: TrainSettings) -> tuple[int, ...]:
        """Return the steps with the memory of all others; the first of a run allocates the optimizers' moments."""
        return (0, 1)


def find_objective(settings: TrainSettings) -> type[Objective]:
    objective: type[Objective] = import_module(f"opensora_cli.engine.train.objectives.{settings.target}").OBJECTIVE
    return objective
