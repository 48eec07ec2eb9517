"""One process at a time in a folder, over real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from opensora_cli.core import folder_lock
from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.folder_lock import LOCK_FILE, locked_file, remove_unheld_locks, sole_run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")

_HOLDER = """
import os, sys, time
from pathlib import Path
from opensora_cli.core.folder_lock import sole_run
with sole_run(Path(sys.argv[1]) / ".lock", problem="in use", hint="wait"):
    # As a process that reads clips: it outlives the one that is killed.
    child = os.fork()
    if not child:
        print(os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    sys.stdin.read()
os.kill(child, 9)
"""


def locked_folder(folder: Path) -> AbstractContextManager[None]:
    return sole_run(folder / LOCK_FILE, problem=f"{folder} is in use by another run", hint="wait")


@contextmanager
def _held_elsewhere(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Let another process hold a folder; yields it, and the number of a process that it has forked."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process, child
    finally:
        process.communicate()


def test_a_second_process_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with _held_elsewhere(folder) as (process, _), pytest.raises(OutputError) as refused, locked_folder(folder):
        pytest.fail("there were two")
    assert refused.value.exit_code == 3
    assert refused.value.message.startswith(f"{folder} is in use by another run: process {process.pid} on ")
    assert refused.value.hint == "wait"
    assert process.returncode == 0
    assert not folder.exists()
    with locked_folder(folder):
        assert f"process {os.getpid()} on " in (folder / LOCK_FILE).read_text()


def test_what_is_in_the_folder_stays(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with locked_folder(tmp_path / "run"):
            (tmp_path / "run" / name).touch()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["first", "second"]
    (tmp_path / "empty").mkdir()
    with locked_folder(tmp_path / "empty"):
        pass
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_file_that_its_owner_removes_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lock = tmp_path / LOCK_FILE, folder_lock._lock

    def late(number: int) -> bool:
        monkeypatch.setattr(folder_lock, "_lock", lock)
        path.unlink()
        return lock(number)

    monkeypatch.setattr(folder_lock, "_lock", late)
    with locked_folder(tmp_path):
        assert path.exists()
        with pytest.raises(OutputError), locked_folder(tmp_path):
            pytest.fail("there were two")


def test_nothing_is_left_of_a_killed_one_although_its_child_lives(tmp_path: Path) -> None:
    with _held_elsewhere(tmp_path) as (process, child):
        process.kill()
        process.wait()
        os.kill(child, 0)
        try:
            with locked_folder(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_lock_files_without_a_holder_are_removed(tmp_path: Path) -> None:
    with locked_file(tmp_path / ".osora-held.lock"):
        (tmp_path / ".osora-left.lock").write_text("process 1 on x\n")
        remove_unheld_locks(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".osora-held.lock"]
    remove_unheld_locks(tmp_path / "nowhere")


def test_lock_files_that_nobody_holds_are_removed_by_the_next_process_that_writes_there(tmp_path: Path) -> None:
    left, held = tmp_path / ".osora-left.lock", tmp_path / ".osora-held.lock"
    left.touch()
    with locked_file(held):
        process = "import sys; from opensora_cli.core.files import *; write_bytes_atomic(sys.argv[1], b'')"
        subprocess.run([sys.executable, "-c", process, str(tmp_path / "a.bin")], check=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == [held.name, "a.bin"]
        left.touch()
        with locked_file(tmp_path / ".osora-mine.lock"):
            assert left.exists()  # this process has looked already


def test_a_second_one_in_this_process_is_refused(tmp_path: Path) -> None:
    with locked_folder(tmp_path):
        with pytest.raises(OutputError, match=f"process {os.getpid()} "), locked_folder(tmp_path):
            pytest.fail("there were two")
        # Who was refused has taken nothing away.
        with pytest.raises(OutputError), locked_folder(tmp_path):
            pytest.fail("there were two")
    with locked_folder(tmp_path), locked_folder(tmp_path / "another"):
        pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"), locked_folder(tmp_path / "file"):
        pytest.fail("there is no such folder")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with locked_folder(tmp_path), locked_folder(tmp_path):
        pass
