"""Interface of training objectives, and their registry. It needs no torch until a task is built.

The module of an objective has its name in `TARGETS` of the settings, and an `OBJECTIVE`. No other module depends on
which objective a run has.
"""

from abc import ABC, abstractmethod
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.encode import inputs
from opensora_cli.settings.train import TrainSettings

if TYPE_CHECKING:
    from torch import nn

    from opensora_cli.engine.encode.clip_cache import ClipCache
    from opensora_cli.engine.train.activations import BatchShape
    from opensora_cli.engine.train.distribution import Distribution
    from opensora_cli.engine.train.objectives.flow_matching import TokenWeights
    from opensora_cli.engine.train.trainer import Task

VAE_FILE = "vae.safetensors"
TRANSFORMER_FILE = "transformer.safetensors"
LORA_FOLDER = "lora"


def find_objective(settings: TrainSettings) -> "Objective":
    """Return the objective of a run."""
    objective: Objective = import_module(f"opensora_cli.engine.train.objectives.{settings.target}").OBJECTIVE
    return objective


class Objective(ABC):
    """Files and sizes of a training objective, and the task that it is in a run."""

    weights_file: str
    """Name of the exported weights, and of the demo's weights of the same part."""

    def exports(self, settings: TrainSettings) -> tuple[str, ...]:
        """Return the names of a finished run's exports, for generation and for other runs."""
        return (self.weights_file,)

    def first_weights(self, settings: TrainSettings) -> Path | None:
        """Return the file or folder of a run's first weights, which may not exist. None means random weights."""
        if settings.init == inputs.PACKAGED:
            return packaged_demo() / self.weights_file
        return None if settings.init is None else Path(settings.init)

    @abstractmethod
    def frozen_parts(self, settings: TrainSettings) -> dict[str, Path | None]:
        """Return the paths of frozen weights by name, None if they are missing."""

    @abstractmethod
    def require_frozen(self, settings: TrainSettings) -> None:
        """Raise CheckpointError if frozen weights are missing; the message names all of them and how to get them."""

    @abstractmethod
    def layer_values(self, settings: TrainSettings, shape: "BatchShape") -> int:
        """Return the number of values in a layer of a micro-batch of this shape, in proportion to its memory."""

    def measured_steps(self, settings: TrainSettings) -> tuple[int, ...]:
        """Return the steps with the memory of all others: the first allocates the optimizers' moments."""
        return (0, 1)

    @abstractmethod
    def stand_in(self, settings: TrainSettings) -> "tuple[Task, list[nn.Module]]":
        """Return the task with random weights and its frozen parts, without any file, to measure or estimate a step."""

    @abstractmethod
    def outline(self, settings: TrainSettings) -> "nn.Module":
        """Return the trained module on the meta device; frozen weights need no gradient.

        Raises RequestError if sizes contradict each other, and HardwareError if a library is missing.
        """

    @abstractmethod
    def build(
        self,
        settings: TrainSettings,
        *,
        distribution: "Distribution",
        clips: "ClipCache | None",
        token_weights: "TokenWeights | None",
        reporter: Reporter,
    ) -> "Task":
        """Return the task with its first weights, or with a module on the meta device if `distribution` divides it.

        Weights without a file are random from torch's global generator.
        """
