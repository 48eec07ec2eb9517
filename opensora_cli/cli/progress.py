"""Progress of stages on stderr, with the time left."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from opensora_cli.core.formatting import best_unit, duration, escaped, format_bytes
from opensora_cli.core.progress import BYTES, StageProgress

Clock = Callable[[], float]


class Pace:
    """How far a stage is, how fast it goes, and what is left of it; `total` is None when that is unknown."""

    def __init__(self, total: int | None, *, clock: Clock = time.monotonic) -> None:
        self.total = total
        self.done = 0
        self._clock = clock
        self._start = clock()
        self._first: tuple[float, int] | None = None
        self._last = self._start

    def advance(self, amount: int) -> None:
        """Count `amount` more units."""
        self.done += amount
        self._last = self._clock()
        if self._first is None:
            self._first = (self._last, self.done)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    @property
    def remaining(self) -> float | None:
        """Seconds left, or None while that cannot be said.

        The first advance is left out of the pace: it has warming up in it.
        """
        if self.total is None or self._first is None or self.done >= self.total:
            return None
        first_time, first_done = self._first
        if self.done == first_done:
            return None
        seconds_per_unit = (self._last - first_time) / (self.done - first_done)
        since = self._clock() - self._last
        return max(0.0, (self.total - self.done) * seconds_per_unit - since)


class LineReporter:
    """Plain lines for logs: one when a stage ends, and one every few seconds while it runs."""

    def __init__(self, *, every: float = 10.0, clock: Clock = time.monotonic) -> None:
        self._every = every
        self._clock = clock

    def note(self, text: str) -> None:
        """Print one line."""
        # At once, with its end: Ctrl-C may come between two writes.
        print(f"{escaped(text)}\n", end="", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print one line, marked as a warning."""
        self.note(f"warning: {text}")

    def figures(self, values: Mapping[str, str]) -> None:
        """Drop them: lines stay where they are."""

    def picture(self, png: bytes, label: str) -> None:
        """Drop it: a log shows none."""

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Run a stage; one that fails ends without a line, since the error will follow, and one of no time, too."""
        running = _LineStage(self, name, unit, Pace(total, clock=self._clock), every=self._every)
        yield running
        if _took_time(running.pace):
            self.note(_summary(name, unit, running.pace))


class _LineStage:
    def __init__(self, reporter: LineReporter, name: str, unit: str, pace: Pace, *, every: float) -> None:
        self.pace = pace
        self._reporter = reporter
        self._name = name
        self._unit = unit
        self._every = every
        self._next = every

    def advance(self, amount: int = 1) -> None:
        self.pace.advance(amount)
        if self.pace.elapsed < self._next or self.pace.done == self.pace.total:
            return
        self._next = self.pace.elapsed + self._every
        self._reporter.note(f"{self._name}: {_count(self.pace, self._unit)}, {_times(self.pace)}")


class BarReporter:
    """Bars on a terminal, stderr by default, one per running stage; a finished stage leaves a line."""

    def __init__(
        self, console: Console | None = None, *, pictures: bool = False, clock: Clock = time.monotonic
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._pictures = pictures
        self._clock = clock
        self._progress: _Bars | None = None

    def note(self, text: str) -> None:
        """Print one line above the bars."""
        self._console.print(Text(escaped(text)), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print one line above the bars, marked as a warning."""
        self._console.print(Text.assemble(("warning: ", "yellow"), escaped(text)), soft_wrap=True)

    def figures(self, values: Mapping[str, str]) -> None:
        """Show them in a table above the bars, until the last bar ends."""
        if self._progress is not None:
            self._progress.values = dict(values)

    def picture(self, png: bytes, label: str) -> None:
        """Show it above the bars, with its line, in the best way that the terminal has."""
        if not self._pictures:
            return
        from opensora_cli.cli.terminal_pictures import shown

        renderable = shown(png, self._console, os.environ)
        if renderable is not None:
            self.note(label)
            self._console.print(renderable, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Run a stage; one that fails ends without a line, since the error will follow, and one of no time, too."""
        pace = Pace(total, clock=self._clock)
        progress = self._started()
        task = progress.add_task(escaped(name), total=total, pace=pace, unit=unit)
        try:
            yield _BarStage(progress, task, pace)
        finally:
            progress.remove_task(task)
            if not progress.tasks:
                progress.stop()
                self._progress = None
        if _took_time(pace):
            self.note(_summary(name, unit, pace))

    def _started(self) -> "_Bars":
        if self._progress is None:
            self._progress = _Bars(
                TextColumn("{task.description:8}", markup=False),
                BarColumn(),
                _PaceColumn(),
                console=self._console,
                transient=True,
                # Data may go to stdout at any time, and stays there.
                redirect_stdout=False,
            )
            self._progress.start()
        return self._progress


class _Bars(Progress):
    """Bars, below the figures of what is running."""

    values: Mapping[str, str] = MappingProxyType({})

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the table of figures, if there are any, and the bars."""
        if self.values:
            yield _table(self.values, width=self.console.width)
        yield from super().get_renderables()


def _table(values: Mapping[str, str], *, width: int) -> Table:
    """Return names above values, in as many columns as there is room for."""
    cells = [(escaped(name), escaped(value)) for name, value in values.items()]
    column = max(len(text) for cell in cells for text in cell) + 2
    table = Table.grid(padding=(0, 2, 0, 0))
    count = max(1, min(len(cells), width // column))
    for start in range(0, len(cells), count):
        row = cells[start : start + count]
        table.add_row(*(Text(name, style="dim") for name, _ in row))
        table.add_row(*(Text(value) for _, value in row))
    return table


class _BarStage:
    def __init__(self, progress: Progress, task: TaskID, pace: Pace) -> None:
        self._progress = progress
        self._task = task
        self._pace = pace

    def advance(self, amount: int = 1) -> None:
        self._pace.advance(amount)
        self._progress.advance(self._task, amount)


class _PaceColumn(ProgressColumn):
    """Units done, time passed and time left."""

    def render(self, task: Task) -> Text:
        pace: Pace = task.fields["pace"]
        count = _count(pace, task.fields["unit"])
        return Text(", ".join(filter(None, (count, _times(pace)))))


def _took_time(pace: Pace) -> bool:
    """Return whether the time of a stage is shown as more than 0."""
    return duration(pace.elapsed) != duration(0)


def _count(pace: Pace, unit: str) -> str:
    if pace.total is None:
        return _amount(pace.done, unit) if pace.done else ""
    if unit != BYTES:
        return f"{pace.done}/{pace.total} {unit}"
    name = best_unit(pace.total)
    return f"{format_bytes(pace.done, unit=name).removesuffix(f' {name}')}/{format_bytes(pace.total, unit=name)}"


def _amount(count: int, unit: str) -> str:
    return format_bytes(count) if unit == BYTES else f"{count} {unit}"


def _times(pace: Pace) -> str:
    left = pace.remaining
    return duration(pace.elapsed) + (f", about {duration(left)} left" if left is not None else "")


def _summary(name: str, unit: str, pace: Pace) -> str:
    done = f"{_amount(pace.done, unit)}, " if pace.total is not None and pace.total > 1 else ""
    return f"{name}: {done}{duration(pace.elapsed)}"
