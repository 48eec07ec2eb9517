"""How the engine reports progress, whatever displays it."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

BYTES = "bytes"
"""The unit of stages that read or write so much: shown as sizes."""


class StageProgress(Protocol):
    """The running stage."""

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more units as done."""


class Reporter(Protocol):
    """Shows messages, figures and the progress of stages."""

    def note(self, text: str) -> None:
        """Show one line of information."""

    def warn(self, text: str) -> None:
        """Show a warning of one line."""

    def figures(self, values: Mapping[str, str]) -> None:
        """Show what is measured of the running stage, by name, in the place of what was shown before."""

    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> AbstractContextManager[StageProgress]:
        """Open a stage of `total` units (None: unknown)."""


class SilentReporter:
    """Shows nothing: the default for library use."""

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def figures(self, values: Mapping[str, str]) -> None: ...

    def advance(self, amount: int = 1) -> None: ...

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Run the stage without a trace."""
        yield self
