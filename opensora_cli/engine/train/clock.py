"""Clock and report of a step."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

PARTS = ("data", "forward", "backward", "exchange", "optimizer", "checkpoint", "validation", "samples")
"""Parts of a step that the clock times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Report of one update, which may be skipped."""

    step: int
    """Number of finished steps, including this one."""
    epoch: int
    figures: Mapping[str, float]
    """`loss`, `grad_norm` and figures of the task: means over all micro-batches and ranks; empty if skipped."""
    learning_rate: float
    samples: int
    """Number of samples of all ranks."""
    tokens: int
    """Number of tokens of all ranks."""
    seconds: Mapping[str, float]
    """Seconds of this rank by `PARTS`, and `total` from the end of the last step to the end of this one."""
    skipped: bool
    """Whether nothing was updated because the loss or gradient was not finite."""
    paths: tuple[str, ...]
    """Paths of this rank's samples; for a skipped step, samples of all ranks that may be the cause."""


class Clock:
    """Clock that times the parts of steps on the host.

    `marks` wrap each part, to show it in profiles. `wait` synchronizes with the device at the end of each part.
    """

    def __init__(
        self,
        *,
        marks: Sequence[Callable[[str], AbstractContextManager[object]]] = (),
        wait: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._marks = marks
        self._wait = wait
        self._now = now
        self._started = now()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str, /) -> Iterator[None]:
        """Add the time of the block to a part; blocks do not nest."""
        with ExitStack() as stack:
            for mark in self._marks:
                stack.enter_context(mark(name))
            started = self._now()
            try:
                yield
                self._wait()
            finally:
                self._seconds[name] += self._now() - started

    def take(self) -> dict[str, float]:
        """Return the seconds of each part, and `total`, since the last call."""
        now = self._now()
        seconds = {**self._seconds, "total": now - self._started}
        self._started, self._seconds = now, defaultdict(float)
        return seconds
