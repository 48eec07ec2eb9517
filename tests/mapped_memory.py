"""Files that tensors map, by Linux's account.

Counting resident pages proves nothing on a busy machine, which evicts them; mapping the same file does.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from torch import Tensor

NO_FILE = "00:00:0"
_SMAPS = Path("/proc/self/smaps")
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+) *(.*)")
_ANONYMOUS = re.compile(r"Anonymous:\s+(\d+) kB")

needs_maps = pytest.mark.skipif(not _SMAPS.exists(), reason="needs Linux's /proc")


def _mappings() -> list[list]:
    """Return first and last address, file as device and inode, its path, and private bytes of each mapping."""
    mappings: list[list] = []
    for line in _SMAPS.read_text().splitlines():
        if header := _HEADER.match(line):
            start, end, device, inode, path = header.groups()
            mappings.append([int(start, 16), int(end, 16), f"{device}:{inode}", path, 0])
        elif anonymous := _ANONYMOUS.match(line):
            mappings[-1][4] = 1024 * int(anonymous[1])
    return mappings


def are_mapped(tensors: Iterable[Tensor], path: Path) -> bool:
    """Return whether all of the tensors, one or more, lie in maps of a file."""
    spans = [(start, end) for start, end, _, name, _ in _mappings() if name == str(path)]
    places = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    assert places
    return all(any(first <= start and end <= last for first, last in spans) for start, end in places)


def mapped_files(tensors: Iterable[Tensor]) -> tuple[list[str], int]:
    """Return the file (device and inode) that each tensor maps, and the bytes written to private copies of its pages.

    A tensor in memory that maps no file has `NO_FILE`.
    """
    mappings, files, copied = _mappings(), [], {}
    for tensor in tensors:
        [(start, _, file, _, anonymous)] = [each for each in mappings if each[0] <= tensor.data_ptr() < each[1]]
        files.append(file)
        copied[start] = 0 if file == NO_FILE else anonymous
    return files, sum(copied.values())
