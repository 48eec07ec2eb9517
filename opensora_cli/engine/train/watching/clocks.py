"""What a step reports, its observers, and the clock that times its parts."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

PARTS = ("data", "forward", "backward", "exchange", "optimizer", "checkpoint", "validation", "samples")
"""What the seconds of a step are divided into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One update, or the attempt at one."""

    step: int
    """Steps that are done, this one included."""
    epoch: int
    figures: Mapping[str, float]
    """`loss`, `grad_norm` and what the task adds: means over all micro-batches and ranks; empty if it was skipped."""
    learning_rate: float
    samples: int
    """Of all ranks."""
    tokens: int
    """Of all ranks."""
    seconds: Mapping[str, float]
    """By `PARTS`, and `total` from the end of the step before to the end of this one; of this rank."""
    skipped: bool
    """Loss or gradient were not finite: nothing was updated."""
    paths: tuple[str, ...]
    """Of this rank's samples; if it was skipped, of those of all ranks that may be the cause."""


class Observer(Protocol):
    """Gets the reports of a run."""

    def start(self, step: int) -> None:
        """Continue after `step`: existing records of later steps are void."""

    def on_step(self, report: StepReport) -> None:
        """Handle the report of a step."""

    def on_validation(self, step: int, figures: Mapping[str, float]) -> None:
        """Handle the figures of a validation after `step` steps."""

    def close(self) -> None:
        """Finish what is written; also after an error or an interruption."""


Mark = Callable[[str], AbstractContextManager[object]]
"""Marks a block in profiles, by its name."""


class Clock:
    """Times the parts of steps as the host sees them.

    `marks` are entered around each part, to show it in profiles. `wait` synchronizes with the device at the end of each
    part, before its time is taken.
    """

    def __init__(
        self,
        *,
        marks: Sequence[Mark] = (),
        wait: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._marks = marks
        self._wait = wait
        self._now = now
        self._started = now()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str, /) -> Iterator[None]:
        """Count the time of the block as that of a part; blocks do not nest."""
        with ExitStack() as stack:
            for mark in self._marks:
                stack.enter_context(mark(name))
            started = self._now()
            try:
                yield
                self._wait()
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - started

    def take(self) -> dict[str, float]:
        """Return the seconds of each part, and `total`, since the last call, and start again."""
        now = self._now()
        seconds = {**self._seconds, "total": now - self._started}
        self._started, self._seconds = now, {}
        return seconds
