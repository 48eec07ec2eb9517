"""Where memory that ranks share is taken from."""

import os
import platform
import subprocess
import sys

import pytest

from opensora_cli.core.limits import PrivateMemory
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


IN_A_FRESH_PROCESS = """
import ctypes, torch
from opensora_cli.core.limits import freed_at_once

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("arena", "ordblks", "smblks", "mapped", *"abcdef")]

mallinfo = ctypes.CDLL(None).mallinfo
mallinfo.restype = Mallinfo

def mapped():
    large, before = [], mallinfo().mapped
    for _ in range(16):
        large.append(torch.empty(31 * 2**20, dtype=torch.uint8))  # None of it is touched.
    return mallinfo().mapped - before

mapped()  # From then on glibc takes such tensors for small ones.
with freed_at_once():
    print(mapped())
print(mapped())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's heap")
def test_large_tensors_are_mapped_one_by_one_inside_the_block_and_taken_from_the_heap_after_it():
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    inside, after = map(int, printed.split())
    assert (inside >= 14, after) == (True, 0), printed  # One or two may fit into gaps that imports left.
