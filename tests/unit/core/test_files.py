"""A file that osora writes is whole or not there."""

import errno
import json
import os
import stat
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from opensora_cli.core import files
from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.files import (
    atomic_folder,
    atomic_path,
    require_space,
    require_writable,
    write_bytes_atomic,
    write_json_atomic,
)


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
