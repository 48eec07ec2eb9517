"""Whether what is to be written fits on the disk."""

import shutil
from pathlib import Path

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.sizes import format_bytes

# For indexes, folders and whatever else a file system keeps beside the data.
_HEADROOM = 2**20


def require_space(path: Path, needed: int) -> None:
    """Check that the disk of `path`, which need not exist, has room for `needed` bytes more.

    Raises:
        OutputError: it has not.
    """
    place = next((place for place in (path, *path.absolute().parents) if place.exists()), Path("/"))
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    if free < needed + _HEADROOM:
        raise OutputError(
            f"{path} needs {format_bytes(needed)}, and its disk has {format_bytes(free)} free",
            hint="make room there, or write to another disk",
        )
