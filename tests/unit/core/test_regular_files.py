"""Links, pipes and files of others under a name that osora writes: they are refused at once and stay unchanged."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.folder_lock import locked_file
from opensora_cli.core.regular_files import open_regular

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other links, and no pipes in folders")

_KEPT = b"kept\n" * 100


def _link(path: Path) -> None:
    path.symlink_to("kept")


def _hard_link(path: Path) -> None:
    path.hardlink_to(path.with_name("kept"))


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


_KINDS = [
    pytest.param(_link, "it is a link", id="link"),
    pytest.param(_hard_link, "it is one of several hard links to a file", id="hard link"),
    pytest.param(_pipe, "it is a pipe", id="pipe"),
    pytest.param(_folder, "Is a directory", id="folder"),
]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "kept"
    path.write_bytes(_KEPT)
    return path


@pytest.mark.parametrize("mode", ["wb", "ab", "a+b", "r+b"])
@pytest.mark.parametrize(("make", "reason"), _KINDS)
def test_only_a_file_of_its_own_is_written(make: Callable[[Path], None], reason: str, mode: str, kept: Path) -> None:
    path = kept.with_name("x")
    make(path)
    with pytest.raises(OSError, match=reason), open(path, mode, opener=open_regular):
        pytest.fail("it was opened")
    assert kept.read_bytes() == _KEPT


def test_a_file_in_a_linked_folder_is_opened_as_its_mode_says(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to("real")
    path = tmp_path / "linked" / "x"
    for mode, expected in (("wb", b"a"), ("ab", b"aa"), ("r+b", b"aa"), ("wb", b"a")):
        with open(path, mode, opener=open_regular) as file:
            file.write(b"a")
        assert path.read_bytes() == expected
    with open(path, "rb", opener=open_regular) as file:
        assert file.read() == b"a"
    with pytest.raises(FileNotFoundError), open(tmp_path / "none", "rb", opener=open_regular):
        pytest.fail("it was opened")


def test_a_name_is_read_only_where_it_is_a_file(kept: Path) -> None:
    for make, reason in ((_link, "it is a link"), (_pipe, "it is a pipe")):
        path = kept.with_name(make.__name__)
        make(path)
        with pytest.raises(OSError, match=reason), open(path, "rb", opener=open_regular):
            pytest.fail("it was opened")


def test_a_link_that_appears_between_the_look_and_the_opening(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lstat = kept.with_name("x"), os.lstat

    def late(name: Path) -> os.stat_result:
        try:
            return lstat(name)
        finally:
            _link(path)

    monkeypatch.setattr(os, "lstat", late)
    with pytest.raises(OSError, match=r"."), open(path, "wb", opener=open_regular):
        pytest.fail("it was opened")
    assert kept.read_bytes() == _KEPT


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_written_only_in_a_folder_of_that_user(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(_KEPT)
    os.chown(path, 12345, -1)
    with (
        pytest.raises(OSError, match=r"it belongs to another user \(uid 12345\)"),
        open(path, "wb", opener=open_regular),
    ):
        pytest.fail("it was opened")
    assert path.read_bytes() == _KEPT
    os.chown(tmp_path, 12345, -1)  # as on network disks that give files to other users than who writes them
    with open(path, "ab", opener=open_regular) as file:
        file.write(b"more")
    assert path.read_bytes() == _KEPT + b"more"


@pytest.mark.parametrize(("make", "reason"), _KINDS)
def test_no_lock_is_written_through_a_link(make: Callable[[Path], None], reason: str, kept: Path) -> None:
    path = kept.with_name(".lock")
    make(path)
    with pytest.raises(OutputError) as refused, locked_file(path):
        pytest.fail("it was locked")
    assert refused.value.message == f"cannot write the lock file {path}: {reason}"
    assert refused.value.hint == "move it away, or choose another folder"
    assert kept.read_bytes() == _KEPT
    assert os.path.lexists(path)


@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_lock_that_cannot_be_written(call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as failing:
        failing.setattr(os, call, fail)
        with pytest.raises(OutputError, match=f"lock file .*: {os.strerror(number)}"), locked_file(tmp_path / ".lock"):
            pytest.fail("it was locked")
    assert list(tmp_path.iterdir()) == []
    with locked_file(tmp_path / ".lock"):
        pass
