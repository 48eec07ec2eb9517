"""Files that are mapped: what changes them for those who use them, and what does not."""

import os

import pytest

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.file_states import FileStates


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(1000))
    os.utime(path, (1, 1))
    return path


def cut(path):
    os.truncate(path, 10)


def write_into(path):
    with path.open("r+b") as opened:
        opened.write(b"other")


def append(path):
    with path.open("ab") as opened:
        opened.write(b"more")


@pytest.mark.parametrize("change", [cut, write_into, append])
def test_a_file_that_is_written_to_is_another(file, change):
    files = FileStates.of([file, file.with_name("is not there")])
    files.require_same(CheckpointError)
    change(file)
    with pytest.raises(CheckpointError, match="weights was changed while it was in use"):
        files.require_same(CheckpointError)


def replace(path):
    path.rename(path.with_name("kept"))  # its number is not given to another
    path.write_bytes(b"another")


@pytest.mark.parametrize("change", [replace, lambda path: path.unlink(), lambda path: path.chmod(0o600)])
def test_who_has_a_file_keeps_it(file, change):
    files = FileStates.of([file])
    change(file)
    files.require_same(CheckpointError)
