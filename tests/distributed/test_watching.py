"""Watched collectives: what ranks report when one of them does something else, or nothing."""

import importlib
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_checkpoint
from torch import Tensor

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.parallel import rendezvous
from opensora_cli.parallel.collectives import all_gather, all_reduce_sum
from opensora_cli.parallel.rendezvous import init_with_retry
from opensora_cli.parallel.watching import Watched, rebuilt_group


def _sum(x: Tensor) -> Tensor:
    return all_reduce_sum(x, dist.group.WORLD)


def _message(watched: Watched, tensor: Tensor, *, name: str = "sum of keys", function: Any = _sum) -> str:
    with pytest.raises(HardwareError) as raised:
        watched(function, tensor, name=name)
    return raised.value.message


def _different() -> list[str]:
    assert dist.group.WORLD is not None
    rank = dist.get_rank()
    watched = Watched(dist.group.WORLD, check_shapes=True, check_finite=True)
    broken = torch.ones(3)
    if rank == 1:
        broken[1] = float("nan")
    messages = [
        _message(watched, torch.ones(3 + rank)),
        _message(watched, torch.ones(3, dtype=(torch.float32, torch.float64)[rank])),
        _message(watched, broken),
        _message(watched, broken.to(torch.float8_e4m3fn)),
        _message(watched, torch.ones(3), name=f"sum {rank}"),
    ]
    # Nothing was sent, so the group still works; shapes may differ where it is said.
    assert watched(_sum, torch.ones(3), name="sum").tolist() == [2.0] * 3
    gathered = watched(
        lambda x: all_gather(x, dist.group.WORLD, dim=0, sizes=(3, 4)),
        torch.ones(3 + rank, 2),
        name="all_gather",
        uneven_dim=0,
    )
    assert gathered.shape == (7, 2)
    return messages


def _late() -> str:
    assert dist.group.WORLD is not None
    watched = Watched(dist.group.WORLD, timeout_s=0.2)
    if dist.get_rank() == 1:
        dist.barrier()
    message = _message(watched, torch.ones(2, 3))
    if dist.get_rank() == 0:
        dist.barrier()
    assert watched(_sum, torch.ones(3), name="sum").tolist() == [2.0] * 3
    return message


def _unwatched() -> int:
    """Return how many keys the store has more after calls that nothing was asked of."""
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    assert Watched(dist.group.WORLD)(_sum, torch.ones(3), name="sum").tolist() == [2.0] * 3
    dist.barrier()
    return store.num_keys() - before


def test_ranks_that_bring_something_else(pool: Callable[[int], Any]) -> None:
    first, second = pool(2).run(_different)
    assert first == second
    assert first == [
        "sum of keys: ranks bring different tensors: rank 0: (3,) float32, rank 1: (4,) float32",
        "sum of keys: ranks bring different tensors: rank 0: (3,) float32, rank 1: (3,) float64",
        "sum of keys, (3,) float32: not finite on rank 1",
        "sum of keys, (3,) float8_e4m3fn: not finite on rank 1",
        "ranks call different collectives: rank 0: sum 0, rank 1: sum 1",
    ]


def test_a_rank_that_comes_too_late(pool: Callable[[int], Any]) -> None:
    assert pool(2).run(_late) == [
        "sum of keys, (2, 3) float32: rank 1 did not come to rank 0 within 0.2 s",
        "sum of keys, (2, 3) float32: rank 0 did not come to rank 1 within 0.2 s",
    ]


def test_what_is_not_asked_for_costs_nothing(pool: Callable[[int], Any]) -> None:
    assert pool(2).run(_unwatched) == [0, 0]


@pytest.mark.slow
def test_a_group_that_broke_is_rebuilt_by_all_or_by_none(processes: Any) -> None:
    first, second = _said(processes, _break_and_rebuild)
    assert first[0].startswith("sum of keys, (4,) float32: failed on rank 0 after ")
    assert first[1] == "sum of keys: an earlier collective of this group failed"
    assert second[0].startswith("sum of keys, (4,) float32: failed on rank 1 after ")
    assert first[2] == second[1] == [3.0, 3.0]
    assert first[3] == "the group cannot be rebuilt: rank 1 did not come within 1 s"
    assert (len(first), len(second)) == (4, 2)


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_rendezvous_is_retried(processes: Any, late: int) -> None:
    """A rank may be late by many times what one attempt takes."""
    assert _said(processes, _meet, late) == [[[2.0]], [[2.0]]]


@pytest.mark.slow
def test_no_store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append, monotonic=lambda: sum(pauses))
    monkeypatch.setattr(rendezvous, "time", clock)
    port = _free_port()
    with pytest.raises(HardwareError, match=f"rank 1: no answer from 127.0.0.1:{port} within "):
        init_with_retry(
            "cpu", host="127.0.0.1", port=port, rank=1, world_size=2, timeout_s=2.0, connect_s=0.1, first_pause_s=0.25
        )
    # The next would be over the limit.
    assert pauses == [0.25, 0.5, 1.0]
    assert not dist.is_initialized()


def test_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HardwareError, match=f"rank 0: cannot listen at port {port}"):
            init_with_retry("cpu", host="127.0.0.1", port=port, rank=0, world_size=2)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _said(processes: Any, scenario: Callable[..., None], *args: Any) -> list[list[Any]]:
    """Run a scenario in two processes of their own, which it may break, and return what they send."""
    port = _free_port()
    started = [processes.start(scenario, port, rank, *args) for rank in range(2)]
    answers = []
    for process, pipe in started:
        answers.append([])
        with suppress(EOFError):
            while pipe.poll(60):
                answers[-1].append(pipe.recv())
        process.join(60)
        assert process.exitcode == 0, answers
    return answers


def _break_and_rebuild(pipe: Connection, port: int, rank: int) -> None:
    init_with_retry("cpu", host="127.0.0.1", port=port, rank=rank, world_size=2)
    dist.barrier()  # The short limit is also one for making the group.
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    watched = Watched(group, check_shapes=True)
    store = dist.distributed_c10d._get_default_store()

    def total(x: Tensor) -> Tensor:
        if rank == 1:
            # It came, and then is silent for longer than the group waits.
            store.wait(["given up"])
        return all_reduce_sum(x, group)

    pipe.send(_message(watched, torch.ones(4), function=total))
    if rank == 0:
        store.set("given up", "")
        pipe.send(_message(watched, torch.ones(4), function=total))
    fresh = rebuilt_group(group, timeout_s=30)
    pipe.send(all_reduce_sum(torch.full((2,), 1.0 + rank), fresh).tolist())
    if rank == 0:
        with pytest.raises(HardwareError) as raised:
            rebuilt_group(fresh, timeout_s=1)
        pipe.send(raised.value.message)
    os._exit(0)  # With a broken group the threads of gloo may abort an ordinary end.


def _meet(pipe: Connection, port: int, rank: int, late: int) -> None:
    if rank == late:
        time.sleep(1)  # Longer than one attempt waits.
    init_with_retry("cpu", host="127.0.0.1", port=port, rank=rank, world_size=2, connect_s=0.2, first_pause_s=0.1)
    pipe.send(all_reduce_sum(torch.ones(1), dist.group.WORLD).tolist())
    dist.destroy_process_group()


def test_ranks_meet_by_a_file_and_open_no_store_on_a_port(processes: Any, tmp_path: Path) -> None:
    """Groups, notes, objects and checkpoints go by it as they do by a store on a port."""
    for met, objects, notes, total in (said[0] for said in _said(processes, _meet_by_file, tmp_path)):
        assert met == "FileStore"
        assert objects == notes == ["rank 0", "rank 1"]
        assert total == [2.0]


def _meet_by_file(pipe: Connection, _: int, rank: int, folder: Path) -> None:
    init_with_retry("cpu", host="", port=0, store_file=folder / "store", rank=rank, world_size=2)
    group = dist.new_group([0, 1])
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, f"rank {rank}", group=group)
    notes = rendezvous.Rendezvous(group, "test").exchange(f"rank {rank}", timeout_s=30.0)
    weights = {"weight": torch.full((1,), float(rank))}
    dist_checkpoint.save(weights, checkpoint_id=folder / "saved")
    total = all_reduce_sum(torch.ones(1), rendezvous.group_with([0, 1]))
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    pipe.send((type(store).__name__, objects, notes, total.tolist()))
    dist.destroy_process_group()


def test_the_folder_of_the_store_is_gone(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="rank 1: the folder of the ranks' store is gone: "):
        init_with_retry("cpu", host="", port=0, store_file=tmp_path / "gone" / "store", rank=1, world_size=2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists threads by name")
def test_no_thread_of_a_group_outlives_it(processes: Any) -> None:
    """One that frees a tensor while Python ends would abort the process."""
    before, after = _said(processes, _leave)[0]
    assert "pt_gloo_runloop" in before
    assert "pt_gloo_runloop" not in after


def _leave(pipe: Connection, port: int, rank: int) -> None:
    # The process that this one was forked from may have it.
    sys.modules.pop("torch.distributed.nn.functional", None)
    init_with_retry("cpu", host="127.0.0.1", port=port, rank=rank, world_size=2)
    # What torch itself imports when it first computes some functions, in the middle of a run.
    importlib.import_module("torch.distributed.nn.functional")
    all_reduce_sum(torch.ones(1), dist.group.WORLD)
    pipe.send(_names_of_threads())
    dist.destroy_process_group()
    pipe.send(_names_of_threads())


def _names_of_threads() -> set[str]:
    return {name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")}
