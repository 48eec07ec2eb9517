"""Detection of mapped files that were written to.

Writing to a mapped file changes the data of every process that has mapped it. Truncating it ends these processes with
a signal that cannot be caught. Replacing it by another file under its name does not affect them.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from opensora_cli.core.exceptions import FileProblem

FileState = tuple[Path, tuple[int, int, int, int]]
"""File with its device, inode, size and modification time."""


@dataclass(frozen=True, slots=True)
class FileStates:
    """Recorded states of files."""

    states: tuple[FileState, ...]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Self:
        """Return the present states of files; missing files are skipped."""
        return cls(tuple((path, state) for path in paths if (state := _state_of(path)) is not None))

    def require_same(self, problem: type[FileProblem]) -> None:
        """Raise `problem` if a file was written to since its state was recorded. Replaced and removed files pass."""
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
