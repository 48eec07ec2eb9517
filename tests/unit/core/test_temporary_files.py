"""What a killed process leaves under a temporary name is removed by the next, and nobody else's is."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opensora_cli.core.files import (
    atomic_folder,
    is_abandoned,
    remove_left,
    temporary_folder,
    temporary_name,
    write_bytes_atomic,
)
from opensora_cli.core.locks import locked_file

TWO_MINUTES, TWO_HOURS, TWO_DAYS = 120.0, 7200.0, 172800.0
PARTS = re.compile(r"\.osora-([0-9a-f]{8})-(\d+)-(\w+)\.tmp")


@pytest.fixture(scope="module")
def of_the_dead():
    """The name that a process has made which is gone."""
    code = "from opensora_cli.core.files import temporary_name; print(temporary_name())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def changed(name, *, place=None, pid=None):
    old_place, old_pid, token = PARTS.fullmatch(name).groups()
    return f".osora-{place or old_place}-{pid or old_pid}-{token}.tmp"


def left(path, *, age_s, is_folder=False):
    if is_folder:
        (path / "inner").mkdir(parents=True)
        (path / "inner" / "half").write_bytes(b"half")
    else:
        path.write_bytes(b"half")
    for each in [*path.rglob("*"), path]:
        os.utime(each, (time.time() - age_s,) * 2)
    return path


@pytest.mark.parametrize("is_folder", [False, True])
def test_the_next_write_beside_it_removes_it(tmp_path, of_the_dead, is_folder):
    left(tmp_path / of_the_dead, age_s=TWO_MINUTES, is_folder=is_folder)
    write_bytes_atomic(tmp_path / "a.bin", b"content")
    assert os.listdir(tmp_path) == ["a.bin"]


def test_that_of_a_living_process_is_kept_however_old(tmp_path):
    code = "from opensora_cli.core.files import temporary_name; print(temporary_name(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as alive:
        theirs = left(tmp_path / alive.stdout.readline().strip(), age_s=TWO_DAYS)
        own = left(tmp_path / temporary_name(), age_s=TWO_DAYS)
        assert not is_abandoned(theirs)
        assert not is_abandoned(own)
        alive.kill()
        alive.wait()
        assert is_abandoned(theirs)
        assert not is_abandoned(own)


@pytest.mark.parametrize(("age_s", "expected"), [(TWO_HOURS, False), (TWO_DAYS, True)])
def test_that_of_another_machine_or_container_is_kept_for_a_day(tmp_path, of_the_dead, age_s, expected):
    name = changed(of_the_dead, place="00000000")
    assert is_abandoned(left(tmp_path / name, age_s=age_s)) is expected


def test_an_old_folder_that_was_renamed_before_a_crash_is_kept(tmp_path, of_the_dead, monkeypatch):
    """Where names cannot be swapped in one step; a kill after the first renaming."""
    monkeypatch.setattr("opensora_cli.core.files._swap_in_one_step", lambda *_: False)
    real = Path.rename

    def rename(self, target):
        moved = real(self, target)
        if Path(target).suffix == ".old":
            os._exit(9)
        return moved

    monkeypatch.setattr(Path, "rename", rename)
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "old.txt").write_text("old")
    if not (child := os.fork()):
        with atomic_folder(tmp_path / "frames") as temporary:
            (temporary / "new.txt").write_text("new")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (old,) = tmp_path.glob("*.old")
    assert os.listdir(old) == ["old.txt"]
    os.utime(old, (0, 0))
    assert not is_abandoned(old)


def test_those_of_processes_that_were_seen_to_end_are_removed_at_once(tmp_path, of_the_dead):
    pid = int(PARTS.fullmatch(of_the_dead)[2])
    others = [changed(of_the_dead, pid=pid + 1), changed(of_the_dead, place="00000000"), f".osora-{pid}.tmp"]
    for name in (of_the_dead, *others):
        left(tmp_path / name, age_s=0.0, is_folder=True)
    remove_left(tmp_path, by=[pid])
    assert sorted(os.listdir(tmp_path)) == sorted(others)


def test_a_temporary_folder_goes_and_so_do_those_of_the_dead(tmp_path, of_the_dead, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left(tmp_path / of_the_dead, age_s=TWO_MINUTES, is_folder=True)
    with temporary_folder() as folder:
        (folder / "a").touch()
        assert os.listdir(tmp_path) == [folder.name]
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
def test_lock_files_that_nobody_holds_are_removed_by_the_next_process_that_writes_there(tmp_path):
    left_lock, held = tmp_path / ".osora-left.lock", tmp_path / ".osora-held.lock"
    left_lock.write_text("process 1 on x\n")
    with locked_file(held):
        process = "import sys; from opensora_cli.core.files import *; write_bytes_atomic(sys.argv[1], b'')"
        subprocess.run([sys.executable, "-c", process, str(tmp_path / "a.bin")], check=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == [held.name, "a.bin"]
