"""Errors of the system while files of weights are read, and what is in their folders. Needs no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from opensora_cli.core import reading as core_reading
from opensora_cli.core.exceptions import CheckpointError

reading = partial(core_reading.reading, problem=CheckpointError)
"""`core.reading` of a checkpoint's files: a CheckpointError names the file that cannot be read."""

require_file = partial(core_reading.require_file, problem=CheckpointError)
"""`core.reading.require_file` of a checkpoint's file."""


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """As `reading`, of a file that must be there."""
    require_file(path)
    with reading(path):
        yield


def visible_files(folder: Path) -> list[Path]:
    """Return what is in a folder, sorted, but for hidden files: those that are being written are hidden."""
    with reading(folder):
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
