"""What the parts of a step take, as the device has them, and marks of them in profiles."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from opensora_cli.engine.train.reports import Clock

Mark = Callable[[str], AbstractContextManager[object]]
"""Marks a block as that of a part."""


class MarkingClock:
    """A clock that marks each part for those who look at the run from outside.

    Args:
        clock: times the parts.
        marks: of each part.
        wait: called at the end of each part, before its time is taken: it returns when the device has done it.
    """

    def __init__(self, clock: Clock, *, marks: Sequence[Mark], wait: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._marks = marks
        self._wait = wait

    @contextmanager
    def part(self, name: str, /) -> Iterator[None]:
        """Count the time of the block as that of a part."""
        with ExitStack() as stack:
            for mark in self._marks:
                stack.enter_context(mark(name))
            with self._clock.part(name):
                yield
                self._wait()

    def take(self) -> dict[str, float]:
        """Return the seconds of each part, and `total`, since the last time, and begin anew."""
        return self._clock.take()
