"""Real gloo processes: one pool for each number of ranks, kept for the whole session.

Each run of a function has groups of its own, since groups that are kept have threads that poll for work.
"""

import gc
import importlib.util
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

_SECONDS = 240.0


class Pool:
    """Processes in which functions of test modules run on all ranks at once."""

    def __init__(self, ranks: int, meeting_place: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._meeting_place = meeting_place
        self._runs = 0
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, ranks, theirs), daemon=True)
            # A rank would import the script that started the tests, which need not be made for that.
            with patch.object(sys.modules["__main__"], "__file__", None, create=True):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)` on every rank and return what each returned; a failure on any rank fails the test."""
        self._runs += 1
        meeting_place = f"{self._meeting_place}_{self._runs}"
        for pipe in self._pipes:
            pipe.send((meeting_place, function.__code__.co_filename, function.__name__, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_SECONDS):
                pytest.fail(f"rank {rank} did not answer within {_SECONDS:.0f} s", pytrace=False)
            answers.append(pipe.recv())
        for rank, (fine, answer) in enumerate(answers):
            if not fine:
                pytest.fail(f"on rank {rank}:\n{answer}", pytrace=False)
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Pool]]:
    """`pool(2).run(function, *args)` runs a function of a test module on two ranks."""
    pools: dict[int, Pool] = {}

    def of(ranks: int) -> Pool:
        if ranks not in pools:
            pools[ranks] = Pool(ranks, tmp_path_factory.mktemp("gloo") / "meeting_place")
        return pools[ranks]

    yield of
    for opened in pools.values():
        opened.close()


def _serve(rank: int, ranks: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            meeting_place, file, name, args = pipe.recv()
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
                gc.freeze()  # so that collecting what a run leaves is quick
            torch.manual_seed(0)
            answer = True, getattr(modules[file], name)(*args)
            # No rank leaves before all have received what it sent; one that fails does.
            dist.barrier()
        except BaseException:
            answer = False, traceback.format_exc()
        dist.destroy_process_group()
        gc.collect()  # models that were divided are part of cycles, and hold their groups
        pipe.send(answer)


def _load(file: str) -> ModuleType:
    # By its file: under pytest's importlib mode a test module's name means nothing to another process.
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
