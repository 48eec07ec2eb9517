"""Interface of training objectives, and their registry.

The module of an objective has its name in `TARGETS` of the settings, and an `OBJECTIVE`. No other module depends on
which objective a run has.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import ClipBatch, SampleRng
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_loop import OptimizerSettings

if TYPE_CHECKING:
    from opensora_cli.engine.encode.clip_cache import ClipCache
    from opensora_cli.engine.train.activations import BatchShape
    from opensora_cli.engine.train.distribution import Distribution
    from opensora_cli.engine.train.parallelize import Sharded

MODEL = "model"
"""Role of the weights that a run exports, with the optimizer of the settings."""

Losses = Iterator[tuple[str, Tensor, Mapping[str, Tensor]]]
"""Roles with their losses, and detached figures for the log."""

TokenWeights = Callable[[ClipBatch, tuple[int, int, int]], Tensor]
"""Function from a micro-batch, and frames, rows and columns of its tokens, to weights (B,N) of tokens in the loss."""


@dataclass(slots=True)
class Role:
    """Weights with an optimizer of their own, such as a discriminator, or a second adapter in the task's module."""

    module: nn.Module
    optimizer: OptimizerSettings
    """Settings of the optimizer, whose schedule counts all steps of the run."""
    owns: Callable[[str], bool] = lambda name: True
    """Function that returns whether a weight of the module belongs to the role, by its name."""
    forward: Callable[..., Any] = field(init=False)
    """Function to call instead of `module`: the module itself, or later its parallel wrapper."""

    def __post_init__(self) -> None:
        self.forward = self.module


class Task(ABC):
    """Training task: a module with its loss and export."""

    module: nn.Module
    """Module that is updated, averaged and saved. It may be sharded in place before training."""
    forward: Callable[..., Any]
    """Function that `loss` calls instead of `module`: the module itself, or later its parallel wrapper."""
    roles: Mapping[str, Role]
    """Other roles than `MODEL`, which has the weights of `module` that they do not own."""

    def __init__(self, module: nn.Module, *, roles: Mapping[str, Role] | None = None) -> None:
        self.module = self.forward = module
        self.roles = roles or {}

    def begin_step(self, step: int) -> None:  # noqa: B027  # most tasks have one phase
        """Begin a new phase of training if one starts after `step` updates. A resumed run repeats the call."""

    @abstractmethod
    def loss(self, batch: Any, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss over the samples of a micro-batch, and this rank's detached figures for the log."""

    def losses(self, batch: Any, rng: SampleRng) -> Losses:
        """Yield the loss of each role that learns in this step; the next is computed after its backward pass.

        All micro-batches of a step have the same roles. A role without a loss is not updated. The backward pass of a
        loss must reach only weights of its role.
        """
        loss, figures = self.loss(batch, rng)
        yield MODEL, loss, figures

    @abstractmethod
    def tokens(self, batch: Any) -> int:
        """Return the number of tokens (of captions or packed latents) of the micro-batch."""

    @abstractmethod
    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write weights for generation to the run's folder. Only the main rank calls this.

        `weights` are whole, on the host, by the names of the module's state: the average, or else the current weights.
        """

    def other_modules(self) -> dict[str, nn.Module]:
        """Return the modules of roles that are not in the task's module."""
        return {name: role.module for name, role in self.roles.items() if role.module is not self.module}

    def trained(self, name: str) -> dict[str, nn.Parameter]:
        """Return the trained weights of a role by name, in the order of its module."""
        role = self.roles.get(name)
        module, owns = (self.module, self._is_of_model) if role is None else (role.module, role.owns)
        return {key: weight for key, weight in module.named_parameters() if weight.requires_grad and owns(key)}

    def shard(self, distribution: "Distribution", *, recipe: Callable[..., "Sharded"] | None = None) -> None:
        """Reduce the modules to this rank's parts. `recipe` is that of `Distribution.shard`."""
        self.forward = distribution.shard(self.module, trained=self.trained(MODEL).values(), recipe=recipe)
        for name, role in self.roles.items():
            if role.module is not self.module:
                role.forward = distribution.shard(role.module, trained=self.trained(name).values())
            elif distribution.mesh is not None and not distribution.divides:
                # Every rank has whole weights, and gradients are averaged.
                role.forward = distribution.replicate(role.module, self.trained(name).values())
            else:
                role.forward = self.forward

    def _is_of_model(self, name: str) -> bool:
        return not any(role.module is self.module and role.owns(name) for role in self.roles.values())


class Objective(ABC):
    """Training objective: its task in a run, and its sizes for plans and estimates."""

    @abstractmethod
    def build(
        self,
        settings: TrainSettings,
        *,
        distribution: "Distribution",
        clips: "ClipCache | None",
        token_weights: TokenWeights | None,
        reporter: Reporter,
    ) -> Task:
        """Return the task with its first weights, or with a module on the meta device if `distribution` divides it.

        Weights without a file are random from torch's global generator.
        """

    @abstractmethod
    def stand_in(self, settings: TrainSettings) -> tuple[Task, list[nn.Module]]:
        """Return the task with random weights and its frozen parts, without any file, to measure or estimate a step."""

    @abstractmethod
    def outline(self, settings: TrainSettings) -> nn.Module:
        """Return the trained module on the meta device; frozen weights need no gradient.

        Raises RequestError if sizes contradict each other, and HardwareError if a library is missing.
        """

    @abstractmethod
    def layer_values(self, settings: TrainSettings, shape: "BatchShape") -> int:
        """Return the number of values in a layer of a micro-batch of this shape, in proportion to its memory."""

    def evaluations(self, settings: TrainSettings) -> float:
        """Return the mean number of evaluations without gradients in a step, beside its forward and backward pass."""
        return 0.0

    def measured_steps(self, settings: TrainSettings) -> tuple[int, ...]:
        """Return the steps with the memory of all others; the first of a run allocates the optimizers' moments."""
        return (0, 1)


def find_objective(settings: TrainSettings) -> Objective:
    """Return the objective of a run."""
    objective: Objective = import_module(f"opensora_cli.engine.train.objectives.{settings.target}").OBJECTIVE
    return objective
