"""Control groups (v2 and v1) that limit processor time and memory of this process."""

from collections.abc import Iterator, Sequence
from pathlib import Path


def cgroup_folders(root: Path, controller: str, *, folders_v1: Sequence[str] = ()) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each group of this process, innermost first, and whether the group has version 2.

    Folders may be missing. In a container, `/proc/self/cgroup` may show paths of the host; the mounted root is then
    this group. `folders_v1` are names of mounts to search, in addition to the mount that the line names.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, controllers, place = (*line.split(":", 2), "", "")[:3]
        is_v2 = controllers == ""
        if not is_v2 and controller not in controllers.split(","):
            continue
        for top in ("",) if is_v2 else dict.fromkeys((controllers, *folders_v1)):
            mount = root / "sys/fs/cgroup" / top
            folder = mount / place.lstrip("/")
            while folder.is_relative_to(mount):
                yield folder, is_v2
                folder = folder.parent


def read_words(folder: Path, *names: str) -> list[str]:
    """Return the words in files of a group, one file after the other; empty if a file cannot be read."""
    try:
        return " ".join((folder / name).read_text(encoding="utf-8") for name in names).split()
    except (OSError, UnicodeDecodeError):
        return []
