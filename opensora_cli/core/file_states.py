"""Whether files are still what they were when they were mapped.

A mapped file that is written to changes under whoever computes with it, and one that is cut short ends the process by a
signal that nothing can catch. One that is replaced by another under its name stays as it was for those who have it.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from opensora_cli.core.exceptions import FileProblem

FileState = tuple[Path, tuple[int, int, int, int]]
"""A file with its device, number, size and time of change."""


@dataclass(frozen=True, slots=True)
class FileStates:
    """Files as they were."""

    states: tuple[FileState, ...]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Self:
        """Return files as they are now; those that are not there are left out."""
        return cls(tuple((path, state) for path in paths if (state := _state_of(path)) is not None))

    def require_same(self, problem: type[FileProblem]) -> None:
        """Raise `problem` if one of the files was written to since; one that was replaced or removed was not."""
        for path, before in self.states:
            now = _state_of(path)
            if now is not None and now != before and now[:2] == before[:2]:
                raise problem(
                    f"{path} was changed while it was in use",
                    hint="run it again; a new file that is renamed over the old one (mv) changes nothing for those who "
                    "use the old one",
                )


def _state_of(path: Path) -> tuple[int, int, int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
