"""Where memory that ranks share is taken from."""

import os
import platform
import re
import sys
from pathlib import Path

import pytest
import torch

from opensora_cli.core.private_memory import PrivateMemory
from opensora_cli.memory import host_memory


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no such files")
@pytest.mark.parametrize(("free_bytes", "is_in_memory"), [(2 * 4096, True), (2 * 4096 - 1, False)])
def test_shared_memory_keeps_to_what_the_control_groups_leave(monkeypatch, tmp_path, free_bytes, is_in_memory):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = PrivateMemory(free_bytes=free_bytes, total_bytes=2**40)
    monkeypatch.setattr(host_memory, "read_private_memory", lambda: left)
    with host_memory._unnamed_file(4096) as file:
        place = os.readlink(f"/proc/self/fd/{file.fileno()}")
        assert os.fstat(file.fileno()).st_size == 4096
    assert place.startswith("/memfd:") is is_in_memory
    assert place.startswith(str(tmp_path)) is not is_in_memory
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's heap")
def test_large_tensors_are_freed_at_once_inside_the_block_and_taken_from_the_heap_outside():
    def in_heap(tensors):
        found = re.search(r"^(\w+)-(\w+) .*\[heap\]$", Path("/proc/self/maps").read_text(), re.MULTILINE)
        start, end = (int(address, 16) for address in found.groups())
        return sum(start <= tensor.data_ptr() < end for tensor in tensors)

    def large():
        # More than the gaps that the heap may have by now; none of it is touched.
        return [torch.empty(31 * 2**20, dtype=torch.uint8) for _ in range(16)]

    large()  # From then on glibc takes such tensors for small ones.
    before = large()
    with host_memory.freed_at_once():
        inside = large()
    after = large()
    assert (in_heap(before) > 8, in_heap(inside) > 8, in_heap(after) > 8) == (True, False, True)
