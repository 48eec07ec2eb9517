"""Runs command lines of osora as a user without rights, each in a fork of a warm process and in a folder of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hostile import failing_calls
from hostile.confined import NOBODY, NOT_POSSIBLE

import opensora_cli

_GIB = 2**30
_TESTS = Path(__file__).parent.parent
_PACKAGE = Path(opensora_cli.__file__).parent.parent
_KEPT = 200_000
"""Characters of what a command prints."""

LIMITS: Mapping[str, int] = {
    "RLIMIT_DATA": 3 * _GIB,
    "RLIMIT_FSIZE": _GIB // 4,
    "RLIMIT_CPU": 120,
    "RLIMIT_CORE": 0,
}
TIME_LIMIT_S = 240.0
"""After which a command counts as hung: most take seconds when idle, and float16 on a CPU without it a minute."""


class NotPossibleError(Exception):
    """This machine has no C compiler, or gives no user without rights access to Python or to osora."""


@dataclass(frozen=True)
class Outcome:
    code: int | None
    """None if a signal ended it."""
    signal: int | None
    hung: bool
    seconds: float
    left_processes: tuple[str, ...]
    """Command lines of what still ran afterwards; it is killed."""
    stdout: str
    stderr: str

    def __str__(self) -> str:
        if self.hung:
            return "hung"
        return f"exit code {self.code}" if self.signal is None else f"ended by {signal.Signals(self.signal).name}"


@dataclass
class Folder:
    """A private folder of a case: where it runs, and the user's home and temporary files."""

    root: Path
    work: Path = field(init=False)
    home: Path = field(init=False)
    temporary: Path = field(init=False)

    def __post_init__(self) -> None:
        self.work, self.home, self.temporary = self.root / "work", self.root / "home", self.root / "tmp"


class Sandbox:
    """A warm process, and the folders of what runs in its forks. A context manager.

    Raises NotPossibleError on entering if a user without rights cannot run osora here.
    """

    def __init__(self) -> None:
        self.uid = NOBODY if os.geteuid() == 0 else None
        self._number = 0

    def __enter__(self) -> Self:
        if sys.platform != "linux":
            raise NotPossibleError("only Linux confines processes in the ways that are used here")
        # Not pytest's own: others may not look into that.
        self._root = Path(tempfile.mkdtemp(prefix="osora-hostile-"))
        self._root.chmod(0o755)
        environment = {**self.environment(Folder(self._root / "nowhere")), "HF_HOME": str(self._root / "hub")}
        library = failing_calls.build(self._root)
        if library is None:
            raise NotPossibleError("there is no C compiler to build the library that breaks system calls")
        environment["LD_PRELOAD"] = str(library)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hostile.warm", *self._needed()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=self._root,
            text=True,
        )
        try:
            with self.folder() as folder:
                self.give_away(folder)
                first = self.run(["--version"], folder)
        except EOFError as error:
            if self._process.wait() == NOT_POSSIBLE:
                raise NotPossibleError("processes cannot be confined here") from error
            raise
        if first.code != 0:
            self.__exit__(None, None, None)
            raise NotPossibleError(f"osora --version as a user without rights: {first}\n{first.stderr}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        shutil.rmtree(self._root, ignore_errors=True)

    def _needed(self) -> list[str]:
        places = {Path(place).resolve() for place in (sys.base_prefix, sys.prefix, _PACKAGE, _TESTS, self._root)}
        return sorted(str(place) for place in places if not any(above in places for above in place.parents))

    def environment(self, folder: Folder) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": os.pathsep.join((str(_PACKAGE), str(_TESTS))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(folder.home),
            "TMPDIR": str(folder.temporary),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    @contextmanager
    def folder(self) -> Iterator[Folder]:
        folder = self.new_folder()
        try:
            yield folder
        finally:
            _remove(folder.root)

    def new_folder(self) -> Folder:
        """Make the empty folder of a case, which stays until the end."""
        self._number += 1
        folder = Folder(self._root / str(self._number))
        for each in (folder.root, folder.work, folder.home, folder.temporary):
            each.mkdir(mode=0o755)
        return folder

    def give_away(self, folder: Folder) -> None:
        if self.uid is None:
            return
        for path, _, files in os.walk(folder.root):
            for each in (path, *(os.path.join(path, name) for name in files)):
                os.chown(each, self.uid, self.uid, follow_symlinks=False)

    def run(
        self,
        argv: Sequence[str],
        folder: Folder,
        *,
        environment: Mapping[str, str] | None = None,
        limits: Mapping[str, int] | None = None,
        signals: Sequence[tuple[float, int]] = (),
        limit_s: float = TIME_LIMIT_S,
        grace_s: float = 5.0,
        patch: str | None = None,
        uid: int | None = None,
        stdout: str = "",
        calls: Sequence[object] = (),
    ) -> Outcome:
        """Run `osora *argv` in `folder`, and wait for its end; it counts as hung after `limit_s`, and is ended.

        `environment` and `limits` (names such as RLIMIT_FSIZE to numbers) come beside the usual ones; `signals` are
        seconds and numbers of what to send it; processes that it started are to end within `grace_s` after it; `patch`
        is `module:function` to call before; `uid` takes the place of nobody's where the tests run as root; `stdout` is
        a device in place of a file, or `pipe` for one that nobody reads; `calls` are arguments of `failing_calls.arm`.
        The first such command in `folder` waits before its first call that changes a file, and this one and all later
        ones go on from there: what is read before has to stay.
        """
        prints = {name: self._root / f"{name}.txt" for name in ("stdout", "stderr")}
        for path in prints.values():  # a command may be killed before it begins
            path.write_bytes(b"")
        request = {
            "stdout": stdout or str(prints["stdout"]),
            "stderr": str(prints["stderr"]),
            "argv": list(argv),
            "folder": str(folder.root),
            "cwd": str(folder.work),
            "uid": self.uid if uid is None or self.uid is None else uid,
            "environment": {**self.environment(folder), **(environment or {})},
            "limits": {**LIMITS, **(limits or {})},
            "signals": list(signals),
            "limit_s": limit_s,
            "grace_s": grace_s,
            "patch": patch,
            "calls": list(calls),
        }
        answer = self._ask(request)
        return Outcome(
            **{**answer, "left_processes": tuple(answer["left_processes"])},
            **{name: path.read_text(errors="backslashreplace")[:_KEPT] for name, path in prints.items()},
        )

    def _ask(self, request: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError("the warm process ended")
        return json.loads(line)


def empty(folder: Folder) -> None:
    """Remove all that is in a folder of a case, but not the folders that it begins with."""
    for each in (folder.work, folder.home, folder.temporary):
        for path in each.iterdir():
            _remove(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _remove(folder: Path) -> None:
    for path, names, _ in os.walk(folder):
        for name in names:
            each = os.path.join(path, name)
            if not os.path.islink(each):
                os.chmod(each, 0o700)
    shutil.rmtree(folder)
