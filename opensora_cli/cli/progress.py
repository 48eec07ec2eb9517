"""Progress of stages on stderr, with the time left, as rich estimates it."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from opensora_cli.core.formatting import best_unit, duration, escaped, format_bytes
from opensora_cli.core.progress import BYTES, StageProgress

Clock = Callable[[], float]

_WHOLE_STAGE = float("inf")
"""Seconds over which rich measures the speed: a step may take longer than its default of 30."""


class LineReporter:
    """Plain lines for logs: one when a stage ends, and one every few seconds while it runs."""

    def __init__(self, *, every: float = 10.0, clock: Clock = time.monotonic) -> None:
        self._every = every
        self._clock = clock

    def note(self, text: str) -> None:
        """Print one line."""
        # Line and end in one write: Ctrl-C may come between two.
        print(f"{escaped(text)}\n", end="", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print one line, marked as a warning."""
        self.note(f"warning: {text}")

    def figures(self, values: Mapping[str, str]) -> None:
        """Ignore figures: printed lines cannot be updated."""

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Run a stage; one that fails or takes no time prints no line."""
        progress = Progress(get_time=self._clock, speed_estimate_period=_WHOLE_STAGE)  # never started: it only counts
        task_id = progress.add_task(name, total=total, unit=unit)
        task = progress.tasks[0]
        next_s = self._every

        def print_now_and_then() -> None:
            nonlocal next_s
            elapsed_s = task.elapsed or 0.0
            if elapsed_s < next_s or task.finished:
                return
            next_s = elapsed_s + self._every
            left = "" if task.time_remaining is None else f", about {duration(task.time_remaining)} left"
            self.note(f"{name}: {_count(task)}, {duration(elapsed_s)}{left}")

        yield _Stage(progress, task_id, print_now_and_then)
        if _took_time(task):
            self.note(_summary(task))


class BarReporter:
    """Bars on a terminal, stderr by default, one per running stage; a finished stage leaves a line."""

    def __init__(self, console: Console | None = None, *, clock: Clock = time.monotonic) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self._progress: _Bars | None = None

    def note(self, text: str) -> None:
        """Print one line above the bars."""
        self._console.print(Text(escaped(text)), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print one line above the bars, marked as a warning."""
        self._console.print(Text.assemble(("warning: ", "yellow"), escaped(text)), soft_wrap=True)

    def figures(self, values: Mapping[str, str]) -> None:
        """Show figures above the bars until the last stage ends."""
        if self._progress is not None:
            self._progress.values = dict(values)

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Run a stage; one that fails or takes no time leaves no line."""
        progress = self._started()
        task_id = progress.add_task(escaped(name), total=total, unit=unit)
        task = next(each for each in progress.tasks if each.id == task_id)
        try:
            yield _Stage(progress, task_id)
        finally:
            progress.remove_task(task_id)
            if not progress.tasks:
                progress.stop()
                self._progress = None
        if _took_time(task):
            self.note(_summary(task))

    def _started(self) -> "_Bars":
        if self._progress is None:
            self._progress = _Bars(
                TextColumn("{task.description:8}", markup=False),
                BarColumn(bar_width=None),
                _CountColumn(Column(no_wrap=True)),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                get_time=self._clock,
                speed_estimate_period=_WHOLE_STAGE,
                transient=True,
                # Results may be printed to stdout at any time and stay there.
                redirect_stdout=False,
            )
            self._progress.start()
        return self._progress


class _Bars(Progress):
    """Bars below the figures of the running stage."""

    values: Mapping[str, str] = MappingProxyType({})

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the figures, if there are any, and the bars."""
        if self.values:
            cells = [Text.assemble((escaped(name), "dim"), "\n", escaped(value)) for name, value in self.values.items()]
            yield Columns(cells, equal=True, padding=(0, 2))
        yield from super().get_renderables()


class _CountColumn(ProgressColumn):
    """Units done of all, or bytes."""

    def render(self, task: Task) -> Text:
        return Text(_count(task))


class _Stage:
    """Running stage; it calls `show` after every advance."""

    def __init__(self, progress: Progress, task_id: TaskID, show: Callable[[], None] = lambda: None) -> None:
        self._progress = progress
        self._task_id = task_id
        self._show = show

    def advance(self, amount: int = 1) -> None:
        self._progress.advance(self._task_id, amount)
        self._show()


def _took_time(task: Task) -> bool:
    """Return whether the duration of a stage is shown as more than 0."""
    return duration(task.elapsed or 0.0) != duration(0)


def _count(task: Task) -> str:
    done, unit = round(task.completed), task.fields["unit"]
    if task.total is None:
        return _amount(done, unit)
    if unit != BYTES:
        return f"{done}/{round(task.total)} {unit}"
    name = best_unit(round(task.total))
    return f"{format_bytes(done, unit=name).removesuffix(f' {name}')}/{format_bytes(round(task.total), unit=name)}"


def _amount(count: int, unit: str) -> str:
    return format_bytes(count) if unit == BYTES else f"{count} {unit}"


def _summary(task: Task) -> str:
    counted = task.total is not None and task.total > 1
    done = f"{_amount(round(task.completed), task.fields['unit'])}, " if counted else ""
    return f"{task.description}: {done}{duration(task.elapsed or 0.0)}"
