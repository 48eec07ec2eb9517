"""Progress of stages as a sign that a rank gets on."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from opensora_cli.core.progress import BYTES, Reporter, StageProgress
from opensora_cli.core.rank_link import beat
from opensora_cli.engine.estimate.offload import DECODE, DENOISE, ENCODE, TEXT

_ON_DEVICE = (TEXT, ENCODE, DENOISE, DECODE)


class WatchedReporter:
    """Hands everything on to `reporter`, and tells the watch each stage and how long its steps take.

    From the second step of a stage on, no step may take longer than `rank_link.linked` allows. The first has warming up
    in it, what follows the last may be anything, and what is read or written comes at the pace of a disk: those take
    as long as they take, while there are signs of work.

    Args:
        reporter: shows the progress.
        clock: seconds, for tests to replace.
    """

    def __init__(self, reporter: Reporter, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._reporter = reporter
        self._clock = clock

    def note(self, text: str) -> None:
        """Hand it on."""
        self._reporter.note(text)

    def warn(self, text: str) -> None:
        """Hand it on."""
        self._reporter.warn(text)

    def figures(self, values: Mapping[str, str]) -> None:
        """Hand them on."""
        self._reporter.figures(values)

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Run a stage that is watched."""
        beat(name, on_device=name in _ON_DEVICE)
        with self._reporter.stage(name, total=total, unit=unit) as progress:
            yield progress if unit == BYTES else _WatchedStage(name, progress, total, self._clock)
        beat(name)


class _WatchedStage:
    def __init__(self, name: str, progress: StageProgress, total: int | None, clock: Callable[[], float]) -> None:
        self._name = name
        self._progress = progress
        self._left = total
        self._clock = clock
        self._last = clock()
        self._longest_s = 0.0

    def advance(self, amount: int = 1) -> None:
        now = self._clock()
        self._longest_s = max(self._longest_s, now - self._last)
        self._last = now
        if self._left is not None:
            self._left -= amount
        is_last = self._left is not None and self._left <= 0
        beat(self._name, None if is_last else self._longest_s, on_device=self._name in _ON_DEVICE)
        self._progress.advance(amount)
