"""One process at a time in a folder, over real processes.

Links, pipes and files of others under a name that osora writes are refused at once and stay unchanged.
"""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from opensora_cli.core import locks
from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.locks import LOCK_FILE, locked_file, open_regular, sole_run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")

_HOLDER = """
import sys
from pathlib import Path
from opensora_cli.core.locks import sole_run
with sole_run(Path(sys.argv[1]) / ".lock", problem="in use", hint="wait"):
    print("locked", flush=True)
    sys.stdin.read()
"""


def locked_folder(folder):
    return sole_run(folder / LOCK_FILE, problem=f"{folder} is in use by another run", hint="wait")


@contextmanager
def _held_elsewhere(folder):
    """Let another process hold a folder; yields it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    try:
        yield process
    finally:
        process.communicate()


def test_a_second_process_is_refused_until_the_first_ends(tmp_path):
    folder = tmp_path / "runs" / "mine"
    with _held_elsewhere(folder) as process, pytest.raises(OutputError) as refused, locked_folder(folder):
        pytest.fail("there were two")
    assert refused.value.exit_code == 3
    assert refused.value.message.startswith(f"{folder} is in use by another run: process {process.pid} on ")
    assert refused.value.hint == "wait"
    assert process.returncode == 0
    assert not folder.exists()
    with locked_folder(folder):
        assert f"process {os.getpid()} on " in (folder / LOCK_FILE).read_text()


def test_what_is_in_the_folder_stays(tmp_path):
    for name in ("first", "second"):
        with locked_folder(tmp_path / "run"):
            (tmp_path / "run" / name).touch()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["first", "second"]
    (tmp_path / "empty").mkdir()
    with locked_folder(tmp_path / "empty"):
        pass
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_file_that_its_owner_removes_in_between(tmp_path, monkeypatch):
    path, lock = tmp_path / LOCK_FILE, locks._lock

    def late(number):
        monkeypatch.setattr(locks, "_lock", lock)
        path.unlink()
        return lock(number)

    monkeypatch.setattr(locks, "_lock", late)
    with locked_folder(tmp_path):
        assert path.exists()
        with pytest.raises(OutputError), locked_folder(tmp_path):
            pytest.fail("there were two")


def test_nothing_is_left_of_a_killed_one(tmp_path):
    with _held_elsewhere(tmp_path) as process:
        process.kill()
        process.wait()
        with locked_folder(tmp_path):
            pass


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with locked_folder(tmp_path), locked_folder(tmp_path):
        pass


_KEPT = b"kept\n" * 100
_KINDS = {
    "it is a link": lambda path: path.symlink_to("kept"),
    "it is one of several hard links to a file": lambda path: path.hardlink_to(path.with_name("kept")),
    "it is a pipe": os.mkfifo,
    "Is a directory": os.mkdir,
}


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "kept"
    path.write_bytes(_KEPT)
    return path


@pytest.mark.parametrize("mode", ["wb", "r+b"])
@pytest.mark.parametrize("reason", _KINDS)
def test_only_a_file_of_its_own_is_written(reason, mode, kept):
    path = kept.with_name("x")
    _KINDS[reason](path)
    with pytest.raises(OSError, match=reason), open(path, mode, opener=open_regular):
        pytest.fail("it was opened")
    assert kept.read_bytes() == _KEPT


def test_a_file_in_a_linked_folder_is_opened_as_its_mode_says(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to("real")
    path = tmp_path / "linked" / "x"
    for mode, expected in (("wb", b"a"), ("ab", b"aa"), ("wb", b"a")):
        with open(path, mode, opener=open_regular) as file:
            file.write(b"a")
        assert path.read_bytes() == expected
    with open(path, "rb", opener=open_regular) as file:
        assert file.read() == b"a"


def test_a_link_that_appears_between_the_look_and_the_opening(kept, monkeypatch):
    path, lstat = kept.with_name("x"), os.lstat

    def late(name):
        try:
            return lstat(name)
        finally:
            path.symlink_to("kept")

    monkeypatch.setattr(os, "lstat", late)
    with pytest.raises(OSError, match=r"."), open(path, "wb", opener=open_regular):
        pytest.fail("it was opened")
    assert kept.read_bytes() == _KEPT


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_written_only_in_a_folder_of_that_user(kept):
    os.chown(kept, 12345, -1)
    with pytest.raises(OSError, match=r"another user \(uid 12345\)"), open(kept, "wb", opener=open_regular):
        pytest.fail("it was opened")
    assert kept.read_bytes() == _KEPT
    os.chown(kept.parent, 12345, -1)  # as on network disks that give files to other users than who writes them
    with open(kept, "ab", opener=open_regular) as file:
        file.write(b"more")
    assert kept.read_bytes() == _KEPT + b"more"


def test_no_lock_is_written_through_a_link(kept):
    path = kept.with_name(".lock")
    path.symlink_to("kept")
    with pytest.raises(OutputError) as refused, locked_file(path):
        pytest.fail("it was locked")
    assert refused.value.message == f"cannot write the lock file {path}: it is a link"
    assert refused.value.hint == "move it away, or choose another folder"
    assert kept.read_bytes() == _KEPT
