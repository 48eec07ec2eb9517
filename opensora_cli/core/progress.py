"""Progress of stages: the interface through which the engine reports it, and bars and lines on stderr."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from opensora_cli.core.formatting import duration, escaped, format_bytes

BYTES = "bytes"
"""Unit of stages that count bytes; their progress is shown as sizes."""
NO_TIME = duration(0)
"""Duration of stages that leave no line."""
_DETAILS = ("attention", "devices", "exchange", "first", "memory", "offload", "prompts", "threads", "weights")
"""First words of notes about how a request is made on this machine."""
_WHOLE_STAGE = float("inf")
"""Seconds over which rich measures the speed: a step may take longer than its default of 30."""


class StageProgress(Protocol):
    """Progress of the running stage."""

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more units as done."""


class Reporter(Protocol):
    """Receiver of messages and the progress of stages."""

    def note(self, text: str) -> None:
        """Show one line of information."""

    def warn(self, text: str) -> None:
        """Show a warning of one line."""

    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> AbstractContextManager[StageProgress]:
        """Open a stage of `total` units. None means unknown."""


class SilentReporter:
    """Reporter that shows nothing, the default for library use."""

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def advance(self, amount: int = 1) -> None: ...

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        yield self


class ConsoleReporter:
    """Shows messages, and a line for each finished stage; bars of running stages, or else a line every few seconds.

    If `is_brief`, notes about the machine and lines of finished stages are left to `--verbose`.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        has_bars: bool,
        is_brief: bool = False,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._has_bars, self._is_brief, self._every_s, self._clock = has_bars, is_brief, every_s, clock
        self._progress: Progress | None = None

    def note(self, text: str) -> None:
        if self._is_brief and text.partition(":")[0] in _DETAILS:
            return
        self._console.print(Text(escaped(text)), soft_wrap=True)

    def warn(self, text: str) -> None:
        self._console.print(Text.assemble(("warning: ", "yellow"), escaped(text)), soft_wrap=True)

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Run a stage; one that fails or takes no time leaves no line."""
        progress = self._progress = self._progress or self._started()
        progress.add_task(escaped(name), total=total, unit=unit, count="")
        task = progress.tasks[-1]
        try:
            yield _Stage(progress, task, lambda: None if self._has_bars else self._print_running(task))
        finally:
            progress.remove_task(task.id)
            if not progress.tasks:
                self._progress = None
                if self._has_bars:
                    progress.stop()
        elapsed_s = task.elapsed or 0.0
        if not self._is_brief and duration(elapsed_s) != NO_TIME:
            done = f"{_amount(task.completed, unit)}, " if (task.total or 0) > 1 else ""
            self.note(f"{name}: {done}{duration(elapsed_s)}")

    def _print_running(self, task: Task) -> None:
        elapsed_s = task.elapsed or 0.0
        if elapsed_s >= task.fields.setdefault("next_s", self._every_s) and not task.finished:
            task.fields["next_s"] = elapsed_s + self._every_s
            left = "" if task.time_remaining is None else f", about {duration(task.time_remaining)} left"
            self.note(f"{task.description}: {task.fields['count']}, {duration(elapsed_s)}{left}")

    def _started(self) -> Progress:
        progress = Progress(
            TextColumn("{task.description:8}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[count]}", markup=False, table_column=Column(no_wrap=True)),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            get_time=self._clock,
            speed_estimate_period=_WHOLE_STAGE,
            transient=True,
            # Results may be printed to stdout at any time and stay there.
            redirect_stdout=False,
        )
        if self._has_bars:
            progress.start()
        return progress


class _Stage:
    """Running stage; it calls `show` after every advance."""

    def __init__(self, progress: Progress, task: Task, show: Callable[[], None]) -> None:
        self._progress, self._task, self._show = progress, task, show
        progress.update(task.id, count=_count(task), refresh=True)

    def advance(self, amount: int = 1) -> None:
        self._progress.advance(self._task.id, amount)
        self._task.fields["count"] = _count(self._task)
        self._show()


def _count(task: Task) -> str:
    unit = task.fields["unit"]
    if task.total is None:
        return _amount(task.completed, unit)
    if unit == BYTES:
        return DownloadColumn().render(task).plain
    return f"{round(task.completed)}/{round(task.total)} {unit}"


def _amount(count: float, unit: str) -> str:
    return format_bytes(round(count)) if unit == BYTES else f"{round(count)} {unit}"
