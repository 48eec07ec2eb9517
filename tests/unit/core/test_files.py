"""A file that osora writes is whole or not there, and what a killed process leaves is removed by the next."""

import errno
import json
import os
import re
import stat
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from opensora_cli.core import files
from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.files import (
    atomic_folder,
    atomic_path,
    is_abandoned,
    remove_left,
    require_space,
    require_writable,
    temporary_folder,
    temporary_name,
    write_bytes_atomic,
    write_json_atomic,
)
from opensora_cli.core.locks import locked_file


def failing(code):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    return fail


def write_folder(path, content):
    with atomic_folder(path) as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / content).write_text(content)


@pytest.mark.parametrize("interruption", [RuntimeError, KeyboardInterrupt])
def test_a_failing_block_leaves_the_old_file(tmp_path, interruption):
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")

    def write_half():
        with atomic_path(target) as temporary:
            temporary.write_bytes(b"ne")
            raise interruption

    with pytest.raises(interruption):
        write_half()
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_full_disk_is_one_line_with_path_and_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(OutputError) as caught:
        write_bytes_atomic(tmp_path / "a.bin", b"content")
    assert caught.value.message == f"cannot write {tmp_path / 'a.bin'}: No space left on device"
    assert caught.value.hint is not None
    assert os.listdir(tmp_path) == []


def test_json_keeps_every_language_and_undecodable_arguments(tmp_path):
    document = {"prompt": 'Regen, Meer "雨" 🌊\n', "argument": "caf\udce9", "seed": 42}
    write_json_atomic(tmp_path / "a.json", document)
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == document
    assert "雨" in text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked to swap names")
def test_the_old_folder_is_at_its_name_until_the_new_one_is(tmp_path, monkeypatch):
    """Where the kernel can swap names, there is no instant without a folder."""
    seen = []
    swap = files._swap_in_one_step
    monkeypatch.setattr(files, "_swap_in_one_step", lambda *names: seen.append(swap(*names)) or seen[-1])
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("a name was given up"))
    (tmp_path / "frames").mkdir()
    write_folder(tmp_path / "frames", "new")
    assert seen == [True]


@pytest.mark.parametrize("old", ["folder", "link"])
@pytest.mark.parametrize("in_one_step", [True, False])
def test_both_ways_to_swap_do_the_same(tmp_path, monkeypatch, old, in_one_step):
    if not in_one_step:
        monkeypatch.setattr(files, "_swap_in_one_step", lambda *_: False)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "old.txt").write_text("old")
    if old == "link":
        (tmp_path / "frames").symlink_to("elsewhere")
    else:
        (tmp_path / "elsewhere").rename(tmp_path / "frames")
    write_folder(tmp_path / "frames", "new")
    assert not (tmp_path / "frames").is_symlink()
    assert (tmp_path / "frames" / "inner" / "new").read_text() == "new"
    # What a link points to belongs to somebody else.
    assert sorted(os.listdir(tmp_path)) == (["elsewhere", "frames"] if old == "link" else ["frames"])
    assert old == "folder" or os.listdir(tmp_path / "elsewhere") == ["old.txt"]


def test_a_swap_that_fails_half_way_is_undone(tmp_path, monkeypatch):
    write_folder(tmp_path / "frames", "old")
    monkeypatch.setattr(files, "_swap_in_one_step", lambda *_: False)
    renamed = []
    rename = Path.rename

    def fail_the_second_time(self, target):
        renamed.append(self)
        if len(renamed) == 2:
            raise OSError(errno.EIO, "broken disk")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_the_second_time)
    with pytest.raises(OutputError, match="broken disk"):
        write_folder(tmp_path / "frames", "new")
    assert os.listdir(tmp_path) == ["frames"]
    assert os.listdir(tmp_path / "frames" / "inner") == ["old"]


def test_a_folder_and_all_that_is_in_it_is_flushed_before_it_takes_the_name(tmp_path, monkeypatch):
    flushed = []

    def note(descriptor):
        inode = os.fstat(descriptor).st_ino
        names = {os.stat(path).st_ino: path.name for path in [tmp_path, *tmp_path.rglob("*")]}
        flushed.append((names[inode], (tmp_path / "frames").exists()))

    monkeypatch.setattr(os, "fsync", note)
    write_folder(tmp_path / "frames", "new")
    temporary = flushed[2][0]
    assert temporary.startswith(".osora-")
    assert flushed == [("inner", False), ("new", False), (temporary, False), (tmp_path.name, True)]


def fail_flushing(monkeypatch, code, *, folders):
    """Let no folder be flushed to the disk, or no file."""
    fsync = os.fsync

    def fail(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == folders:
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_folder_that_cannot_be_flushed_is_no_failure(tmp_path, monkeypatch, code):
    fail_flushing(monkeypatch, code, folders=True)
    write_folder(tmp_path / "frames", "new")
    assert os.listdir(tmp_path / "frames" / "inner") == ["new"]


def test_a_file_that_cannot_be_flushed_is_not_written(tmp_path, monkeypatch):
    write_bytes_atomic(tmp_path / "a.bin", b"old")
    fail_flushing(monkeypatch, errno.EINVAL, folders=False)
    with pytest.raises(OutputError, match=r"cannot write .*a\.bin"):
        write_bytes_atomic(tmp_path / "a.bin", b"new")
    assert (tmp_path / "a.bin").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("race", [True, False])
def test_a_file_that_appears_meanwhile_is_kept(tmp_path, race):
    target = tmp_path / "a.bin"

    def write():
        with atomic_path(target, replace=False) as temporary:
            temporary.write_bytes(b"mine")
            if race:
                target.write_bytes(b"theirs")

    with pytest.raises(OutputError, match="exists already") if race else nullcontext():
        write()
    assert target.read_bytes() == (b"theirs" if race else b"mine")
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path):
    target = tmp_path / "frames"

    def write():
        with atomic_folder(target, replace=False) as temporary:
            (temporary / "mine.txt").touch()
            target.mkdir()
            (target / "theirs.txt").touch()

    with pytest.raises(OutputError, match="exists already"):
        write()
    assert os.listdir(tmp_path) == ["frames"]
    assert not (target / "mine.txt").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes among files")
@pytest.mark.parametrize("write", [write_folder, lambda path, content: write_bytes_atomic(path, content.encode())])
def test_a_pipe_is_not_replaced(tmp_path, write):
    os.mkfifo(tmp_path / "a")
    with pytest.raises(OutputError, match="a is neither a file nor a folder"):
        write(tmp_path / "a", "content")
    assert (tmp_path / "a").is_fifo()
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("name", "overwrite", "message"),
    [
        ("new/a.bin", False, None),
        ("old.bin", True, None),
        ("old.bin", False, "exists already"),
        ("folder", True, "is a folder"),
        ("old.bin/a.bin", False, "cannot write"),
    ],
)
def test_a_place_for_a_file_is_checked_before_the_work(tmp_path, name, overwrite, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "old.bin").touch()
    with nullcontext() if message is None else pytest.raises(OutputError, match=message):
        require_writable(tmp_path / name, overwrite=overwrite)
    assert sorted(os.listdir(tmp_path)) == ["folder", "old.bin"]


def test_the_room_on_a_disk_is_checked_where_it_is_known(tmp_path, monkeypatch):
    require_space(tmp_path / "new" / "a", 1)
    with pytest.raises(OutputError, match=r"a needs 4611686\.0 TB, and its disk has .* free"):
        require_space(tmp_path / "a", 2**62)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=0, free=0))
    require_space(tmp_path / "a", 2**62)


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
