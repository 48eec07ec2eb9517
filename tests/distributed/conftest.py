"""Real processes that talk over gloo: one pool for each number of ranks, kept for the whole session."""

import importlib.util
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_SECONDS = 240.0


class Pool:
    """Processes of one gloo group, in which functions of test modules run on all ranks at once."""

    def __init__(self, ranks: int, meeting_place: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, ranks, str(meeting_place), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)` on every rank and return what each returned; a failure on any rank fails the test."""
        for pipe in self._pipes:
            pipe.send((function.__code__.co_filename, function.__name__, args))
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


def _serve(rank: int, ranks: int, meeting_place: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=ranks, timeout=timedelta(seconds=_SECONDS)
    )
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            file, name, args = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            if file not in modules:
                modules[file] = _load(file)
            torch.manual_seed(0)
            pipe.send((True, getattr(modules[file], name)(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


def _load(file: str) -> ModuleType:
    # By its file: under pytest's importlib mode a test module's name means nothing to another process.
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
