"""Real gloo processes, kept for many runs: a run on some ranks takes as many of them.

They are forks of one process that has imported what they need. Each run has groups of its own. A process in which
threads of earlier groups stay is replaced, because these poll for work.
"""

import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

_SECONDS = 240.0
_MOST_POLLING = 4
"""Threads of earlier runs beyond which a process is replaced: they slow down all that follows."""
_IMPORTED_ONCE = [
    "opensora_cli.engine.train.run",
    "torch._functorch.aot_autograd",
    "torch.distributed.fsdp",
    "peft",
]


class Processes:
    def __init__(self) -> None:
        # Only Linux forks safely after torch is imported, since there no library has started a thread by then.
        self._context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        self._started: list[tuple[Any, Connection]] = []
        multiprocessing.set_forkserver_preload(_IMPORTED_ONCE)

    def start(self, function: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
        """Start a process that calls `function(pipe, *args)`, and return it and the other end of its pipe."""
        ours, theirs = self._context.Pipe()
        named = (function.__code__.co_filename, function.__name__)
        process = self._context.Process(target=_call, args=(*named, theirs, *args), daemon=True)
        # It would import the script that started the tests, which need not be made for that.
        with patch.object(sys.modules["__main__"], "__file__", None, create=True):
            process.start()
        theirs.close()
        return process, ours

    def pipes(self, ranks: int) -> list[Connection]:
        while len(self._started) < ranks:
            self._started.append(self.start(_serve))
        return [pipe for _, pipe in self._started[:ranks]]

    def replace(self, rank: int) -> None:
        _end(*self._started[rank])
        self._started[rank] = self.start(_serve)

    def program(self, folder: Path, function: Callable[..., int | None], *args: Any) -> "Program":
        """Start `function(*args)` as a program that writes its output to `folder`, in the environment of this one."""
        named = (function.__code__.co_filename, function.__name__, *args)
        return Program(self.start(_print_to_files, folder, dict(os.environ), *named)[0], folder)

    def osora(self, folder: Path, words: list[str]) -> "Program":
        return self.program(folder, _osora, words)

    def end(self) -> None:
        for process, pipe in self._started:
            _end(process, pipe)


def _end(process: Any, pipe: Connection) -> None:
    pipe.close()
    process.join(10)
    if process.is_alive():
        process.kill()


class Program:
    """A process that a test can interrupt."""

    def __init__(self, process: Any, folder: Path) -> None:
        self._process = process
        self._folder = folder

    def send(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def is_running(self) -> bool:
        return self._process.is_alive()

    def end(self, seconds: float) -> tuple[int, str, str]:
        self._process.join(seconds)
        assert not self.is_running()
        out, err = (self._folder / f"{self._process.pid}.{name}" for name in ("out", "err"))
        return self._process.exitcode, out.read_text(), err.read_text()


class Pool:
    """Ranks in which functions of test modules run at once."""

    def __init__(self, processes: Processes, ranks: int, meeting_places: Iterator[Path]) -> None:
        self._processes = processes
        self._ranks = ranks
        self._meeting_places = meeting_places

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)` on every rank and return what each returned; a failure on any rank fails the test."""
        meeting_place = str(next(self._meeting_places))
        pipes = self._processes.pipes(self._ranks)
        for rank, pipe in enumerate(pipes):
            place = (meeting_place, rank, self._ranks)
            pipe.send((place, function.__code__.co_filename, function.__name__, args))
        answers = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(_SECONDS):
                pytest.fail(f"rank {rank} did not answer within {_SECONDS:.0f} s", pytrace=False)
            answers.append(pipe.recv())
        for rank, (_, _, is_worn) in enumerate(answers):
            if is_worn:
                self._processes.replace(rank)
        for rank, (fine, answer, _) in enumerate(answers):
            if not fine:
                pytest.fail(f"on rank {rank}:\n{answer}", pytrace=False)
        return [answer for _, answer, _ in answers]


@pytest.fixture(scope="package")
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.end()


@pytest.fixture
def no_ranks_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what would make a rank of this process, and let ranks find the package and take one thread."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture(scope="package")
def pool(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Pool]:
    """`pool(2).run(function, *args)` runs a function of a test module on two ranks."""
    folder = tmp_path_factory.mktemp("gloo")
    meeting_places = (folder / str(number) for number in count())
    return lambda ranks: Pool(processes, ranks, meeting_places)


def _osora(words: list[str]) -> int:
    from opensora_cli.cli.app import main

    tempfile.tempdir = None  # this process is a fork of one with another TMPDIR
    return main(words)


def _call(file: str, name: str, *args: Any) -> Any:
    return getattr(_load(file), name)(*args)


def _print_to_files(_: Connection, folder: Path, environment: dict[str, str], *named: Any) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{os.getpid()}.{name}", os.O_WRONLY | os.O_CREAT), stream)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    sys.exit(_call(*named))


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import debug

    clear_cache = getattr(debug, "_clear_sharding_prop_cache", lambda: None)
    torch.set_num_threads(1)
    gc.freeze()  # so that collecting what a run leaves is quick
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            (meeting_place, rank, ranks), file, name, args = pipe.recv()
        except (EOFError, OSError):
            break
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting_place}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=_SECONDS),
        )
        try:
            if file not in modules:
                modules[file] = _load(file)
                gc.freeze()
            torch.manual_seed(0)
            answer = True, getattr(modules[file], name)(*args)
            # No rank leaves before all have received what it sent; one that fails does.
            dist.barrier()
        except BaseException:
            answer = False, traceback.format_exc()
        dist.destroy_process_group()
        # Both hold groups: torch's cache of how operators divide tensors, and cycles with models that were divided.
        clear_cache()
        gc.collect()
        is_worn = _polling_threads() > _MOST_POLLING
        try:
            pipe.send((*answer, is_worn))
        except Exception:  # an answer that cannot be pickled fails its own test, not all that follow
            pipe.send((False, traceback.format_exc(), is_worn))


def _polling_threads() -> int:
    """Return the number of gloo's threads, which poll the closed connections of groups that outlive their run."""
    tasks, found = Path("/proc/self/task"), 0
    for task in tasks.iterdir() if tasks.is_dir() else ():
        with suppress(OSError):  # a thread that ends
            found += (task / "comm").read_text().startswith("gloo_tcp")
    return found


def _load(file: str) -> ModuleType:
    # By its file: under pytest's importlib mode a test module's name means nothing to another process.
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
