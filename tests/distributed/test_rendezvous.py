"""Ranks that join: late ones, taken ports, and file stores."""

import importlib
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_checkpoint

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.launch.rank import init_with_retry
from opensora_cli.parallel.collectives import all_reduce_sum


def join(rank: int, port: int = 0, *, host: str = "127.0.0.1", store: Path | None = None, **options: Any) -> None:
    place = {"rank": rank, "local_rank": rank, "world_size": 2, "nnodes": 1}
    init_with_retry("cpu", RankContext(**place, master_addr=host, master_port=port, store=store), **options)


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_rendezvous_is_retried(processes, late):
    assert _said(processes, _meet, late) == [[[2.0]], [[2.0]]]


def test_the_port_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HardwareError, match=f"rank 0: cannot listen at port {port}"):
            join(0, port)


def test_rank_0_does_not_wait_for_an_address_that_leads_elsewhere():
    """No packet comes back from this network (RFC 5737)."""
    with pytest.raises(HardwareError, match="rank 0: rank 1 did not come in time"):
        join(0, _free_port(), host="203.0.113.1", timeout_s=1.0)


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


def _meet(pipe: Connection, port: int, rank: int, late: int) -> None:
    if rank == late:
        time.sleep(1.0)
    join(rank, port)
    pipe.send(all_reduce_sum(torch.ones(1), dist.group.WORLD).tolist())
    dist.destroy_process_group()


def test_ranks_meet_by_a_file_and_open_no_store_on_a_port(processes, tmp_path):
    """Groups, objects and checkpoints use it like a store on a port."""
    for met, objects, total in (said[0] for said in _said(processes, _meet_by_file, tmp_path)):
        assert met == "FileStore"
        assert objects == ["rank 0", "rank 1"]
        assert total == [2.0]


def _meet_by_file(pipe: Connection, _: int, rank: int, folder: Path) -> None:
    join(rank, store=folder / "store")
    group = dist.new_group([0, 1])
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, f"rank {rank}", group=group)
    weights = {"weight": torch.full((1,), float(rank))}
    dist_checkpoint.save(weights, checkpoint_id=folder / "saved")
    total = all_reduce_sum(torch.ones(1), group)
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    pipe.send((type(store).__name__, objects, total.tolist()))
    dist.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists threads by name")
def test_no_thread_of_a_group_outlives_it(processes):
    """One that frees a tensor while Python ends would abort the process."""
    before, after = _said(processes, _leave)[0]
    assert "pt_gloo_runloop" in before
    assert "pt_gloo_runloop" not in after


def _leave(pipe: Connection, port: int, rank: int) -> None:
    # The process that this one was forked from may have it.
    sys.modules.pop("torch.distributed.nn.functional", None)
    join(rank, port)
    # What torch itself imports when it first computes some functions, in the middle of a run.
    importlib.import_module("torch.distributed.nn.functional")
    all_reduce_sum(torch.ones(1), dist.group.WORLD)
    pipe.send(_names_of_threads())
    dist.destroy_process_group()
    pipe.send(_names_of_threads())


def _names_of_threads() -> set[str]:
    return {name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")}
