"""Which file a tensor's memory maps, by Linux's account.

Counting resident pages proves nothing on a busy machine, which evicts them; mapping the same file does.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

NO_FILE = "00:00:0"
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+)")
_ANONYMOUS = re.compile(r"Anonymous:\s+(\d+) kB")


def mapped_files(tensors: Iterable[Tensor]) -> tuple[list[str], int]:
    """Return the file (device and inode) that each tensor maps, and the bytes written to private copies of its pages.

    A tensor in memory that maps no file has `NO_FILE`.
    """
    mappings: list[list] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := _HEADER.match(line):
            start, end, device, inode = header.groups()
            mappings.append([int(start, 16), int(end, 16), f"{device}:{inode}", 0])
        elif anonymous := _ANONYMOUS.match(line):
            mappings[-1][3] = 1024 * int(anonymous[1])
    files, copied = [], {}
    for tensor in tensors:
        [(start, _, file, anonymous)] = [each for each in mappings if each[0] <= tensor.data_ptr() < each[1]]
        files.append(file)
        copied[start] = 0 if file == NO_FILE else anonymous
    return files, sum(copied.values())
