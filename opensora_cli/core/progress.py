"""Interface through which the engine reports progress."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

BYTES = "bytes"
"""Unit of stages that count bytes; their progress is shown as sizes."""


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
