"""Kills a process in the middle of a save, at every step that changes the file system.

Use it in a process of its own, which has no other threads: it forks.
"""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opensora_cli.core import files

_STEPS = ("rename", "replace", "mkdir", "rmdir", "unlink", "link", "symlink", "truncate", "ftruncate")

Tree = dict[str, bytes] | bytes | None
"""What is at a path: files by name, the content of a file, or nothing."""


def kill_at_every_step(
    prepare: Callable[[], object],
    save: Callable[[], object],
    check: Callable[[], object],
    *,
    first: int = 1,
    stride: int = 1,
) -> int:
    """Run `save` in child after child, each killed (SIGKILL) at a later step, and return how many died.

    A step is a write, an fsync, a renaming, or whatever else changes the file system. Of a write half is done, of the
    others nothing, when the process dies. `prepare` makes what `save` finds, before each child; `check` is called
    after each death, and after the end of the child that comes to its end.
    """
    deaths = 0
    while True:
        prepare()
        child = os.fork()
        if not child:
            _run(save, first + deaths * stride)
        _, status = os.waitpid(child, 0)
        check()
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the save failed by itself"
            return deaths
        assert os.WTERMSIG(status) == signal.SIGKILL
        deaths += 1


def run_script(file: str, *arguments: object) -> Any:
    """Run a test module as a program, which may fork and count what it writes, and return the JSON that it prints."""
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    command = [sys.executable, file, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tree(path: Path) -> Tree:
    if path.is_dir():
        return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}
    return path.read_bytes() if path.exists() else None


def _run(save: Callable[[], object], last_step: int) -> None:
    try:
        _Steps(last_step).count()
        save()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


class _Steps:
    """Counts the steps of this process, and ends it at the last."""

    def __init__(self, last: int) -> None:
        self._left = last

    def count(self) -> None:
        """Begin to count: from now on the functions of `os` and the files that are opened for writing are watched."""
        os.write = self._watched_write(os.write)
        for name in _STEPS:
            setattr(os, name, self._watched(getattr(os, name)))
        os.fsync = self._watched(lambda _: None)  # a killed process loses nothing that it wrote: why wait
        files._swap_in_one_step = self._watched(files._swap_in_one_step)
        io.open = self._open  # pathlib opens files with it

    def _is_last(self) -> bool:
        self._left -= 1
        return not self._left

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            if self._is_last():
                _die()
            return function(*args, **options)

        return step

    def _watched_write(self, function: Callable[..., int]) -> Callable[..., int]:
        def step(target: Any, content: Any) -> int:
            if self._is_last():
                function(target, memoryview(content)[: len(content) // 2])
                _die()
            return function(target, content)

        return step

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        # What is written to the kernel is not in the file system.
        if not set(mode) & set("wax+") or str(file).startswith("/proc/"):
            return open(file, mode, buffering, *args, **options)
        watched = self._watched_write(io.FileIO.write)

        class File(io.FileIO):
            def write(self, content: Any) -> int:
                return watched(self, content)

        opener = options.pop("opener", None)  # of a temporary file without a name
        raw = File(file, mode.replace("b", "").replace("t", ""), opener=opener)
        if not buffering:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
