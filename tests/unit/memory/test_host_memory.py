"""Where memory that ranks share is taken from."""

import os
import sys

import pytest

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
