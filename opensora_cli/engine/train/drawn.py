"""Batches that are made up as training goes on, and so never end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.train.task import Batch, Chance

BatchT = TypeVar("BatchT", bound=Batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A micro-batch whose contents the task draws itself."""

    number: int

    @property
    def paths(self) -> tuple[str, ...]:
        """The number, since there are no files."""
        return (f"drawn:{self.number}",)


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
