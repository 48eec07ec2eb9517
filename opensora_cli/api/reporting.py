"""Progress and log lines of a run, for Python programs."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

_log = logging.getLogger("opensora_cli")


class Progress(NamedTuple):
    """Progress of a stage."""

    stage: str
    """Such as load, text, denoise, decode."""
    done: int
    total: int | None
    """None: unknown."""
    unit: str
    """Unit of `done`, such as evaluations, tiles or bytes."""


OnProgress = Callable[[Progress], object]
"""Called when a stage begins, and after each unit of its work; what it raises ends the run."""


class LoggingReporter:
    """Logs warnings, and notes at the level INFO, by the name `opensora_cli`; progress goes to a function."""

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        self._on_progress = on_progress

    def note(self, text: str) -> None:
        """Log one line of information."""
        _log.info("%s", text)

    def warn(self, text: str) -> None:
        """Log a warning of one line."""
        _log.warning("%s", text)

    def figures(self, values: Mapping[str, str]) -> None:
        """Drop them: no stage of a generation has any."""

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator["_Stage"]:
        """Hand on the progress of a stage."""
        stage = _Stage(name, total, unit, self._on_progress)
        stage.advance(0)
        yield stage


class _Stage:
    def __init__(self, name: str, total: int | None, unit: str, on_progress: OnProgress | None) -> None:
        self._name, self._total, self._unit, self._on_progress = name, total, unit, on_progress
        self._done = 0

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        if self._on_progress is not None:
            self._on_progress(Progress(self._name, self._done, self._total, self._unit))
