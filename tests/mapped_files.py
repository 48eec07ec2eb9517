"""Which tensors are views of a mapped file, as Linux tells it."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from torch import Tensor

MAPS = Path("/proc/self/maps")

needs_maps = pytest.mark.skipif(not MAPS.exists(), reason="needs Linux's /proc")


def are_mapped(tensors: Iterable[Tensor], path: Path) -> bool:
    """Return whether all of the tensors, one or more, lie in maps of a file."""
    lines = re.findall(rf"^(\w+)-(\w+) .*{re.escape(str(path))}$", MAPS.read_text(), re.MULTILINE)
    spans = [(int(start, 16), int(end, 16)) for start, end in lines]
    places = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    assert places
    return all(any(first <= start and end <= last for first, last in spans) for start, end in places)
