"""Operating system errors while weights are read, and listings of their folders. Needs no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from opensora_cli.core import reading as core_reading
from opensora_cli.core.exceptions import CheckpointError

reading = partial(core_reading.reading, problem=CheckpointError)
"""`core.reading` for checkpoint files: a CheckpointError names the file that cannot be read."""

require_file = partial(core_reading.require_file, problem=CheckpointError)
"""`core.reading.require_file` for a checkpoint file."""


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """Read a file that must exist, with the errors of `reading`."""
    require_file(path)
    with reading(path):
        yield


def visible_files(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted, without hidden files. Unfinished files are hidden."""
    with reading(folder):
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
