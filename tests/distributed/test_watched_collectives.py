"""All collectives of a run watched: who does not come to which is named by all that did."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.parallel.watched_collectives import watched_collectives


def _fine() -> list[Any]:
    """Do one of everything that ranks of a run do together."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    evens = dist.new_group(list(range(0, ranks, 2)))
    with watched_collectives(limit_s=60):
        total = torch.ones(3)
        dist.all_reduce(total)
        objects = [None] * ranks
        dist.all_gather_object(objects, rank)
        if rank % 2 == 0:
            dist.all_reduce(total, group=evens)
        model = DistributedDataParallel(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        received = torch.zeros(2)
        transfers = [
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        own = torch.full((2,), float(rank))
        each = [torch.zeros(2) for _ in range(ranks)]
        dist.gather(own, each if rank == 1 else None, dst=1)
        scattered = torch.zeros(2)
        dist.scatter(scattered, each if rank == 1 else None, src=1)
        shared = own.clone()
        dist.broadcast(shared, src=1)
        summed = torch.zeros(2)
        dist.reduce_scatter(summed, [own] * ranks)
        tensors = [scattered.tolist(), shared.tolist(), summed.tolist()]
        dist.barrier()
    return [total.tolist(), objects, received.tolist(), tensors]


def _sharded() -> tuple[list[float], float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with watched_collectives(limit_s=60):
        numbers = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        return numbers.full_tensor().tolist(), float((numbers * 2).sum().full_tensor())


def _sharded_and_not_gathered() -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    numbers = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    part = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    gathered = _message(lambda: dist.barrier() if rank else numbers.full_tensor())
    # Where an operator on DTensors calls the collective itself.
    added = _message(lambda: dist.barrier() if rank else torch.relu(part))
    return gathered, added


def _message(act: Callable[[], object]) -> str:
    with watched_collectives(limit_s=2), pytest.raises(HardwareError) as raised:
        act()
    return raised.value.message


def _absent() -> str | None:
    group = dist.new_group([0, 1, 2, 3])
    meet = dist.new_group([0, 1, 2, 3])
    message = None
    if dist.get_rank() != 2:
        message = _message(lambda: dist.all_to_all_single(torch.zeros(4), torch.ones(4), group=group))
    dist.barrier(group=meet)
    return message or _message(lambda: dist.all_to_all_single(torch.zeros(4), torch.ones(4), group=group))


def _different() -> tuple[str, str]:
    rank = dist.get_rank()
    calls = _message(lambda: dist.barrier() if rank else dist.all_reduce(torch.ones(2)))
    types = _message(lambda: dist.all_reduce(torch.ones(2, dtype=(torch.float32, torch.float64)[rank])))
    return calls, types


def _silent() -> str | None:
    if dist.get_rank() == 1:
        dist.barrier()
        return None
    message = _message(lambda: dist.recv(torch.zeros(2), src=1))
    dist.barrier()
    return message


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_goes_on_as_without(pool: Callable[[int], Any], ranks: int) -> None:
    for rank, (total, objects, received, tensors) in enumerate(pool(ranks).run(_fine)):
        assert total == [float(ranks * (ranks // 2 if rank % 2 == 0 else 1))] * 3
        assert objects == list(range(ranks))
        assert received == [float((rank - 1) % ranks)] * 2
        assert tensors == [[float(rank)] * 2, [1.0] * 2, [float(sum(range(ranks)))] * 2]


def test_the_collectives_of_sharded_tensors_are_watched(pool: Callable[[int], Any]) -> None:
    assert pool(2).run(_sharded) == [([0.0, 1.0, 2.0, 3.0], 12.0)] * 2
    for gathered, added in pool(2).run(_sharded_and_not_gathered):
        assert "rank 0: all_gather of float32, rank 1: barrier of" in gathered
        assert "rank 0: all_reduce of float32, rank 1: barrier of" in added


def test_the_rank_that_does_not_come_is_named(pool: Callable[[int], Any]) -> None:
    missing = "all_to_all between ranks 0, 1, 2, 3: rank 2 did not come within 2 s"
    first, second, late, last = pool(4).run(_absent)
    # Of those that came, one gives up first, and the others may learn of it before their own time is over.
    assert missing in (first, second, last)
    for message in (first, second, last):
        assert message == missing or message.startswith("all_to_all between ranks 0, 1, 2, 3: rank ")
    assert late.startswith("all_to_all between ranks 0, 1, 2, 3: rank ")
    assert late.endswith(" gave up waiting for rank 2")


def test_ranks_that_call_different_collectives(pool: Callable[[int], Any]) -> None:
    calls, types = zip(*pool(2).run(_different), strict=True)
    for message in calls:
        assert "rank 0: all_reduce of float32, rank 1: barrier of" in message
    for message in types:
        assert "rank 0: all_reduce of float32, rank 1: all_reduce of float64" in message


@pytest.mark.slow
def test_a_message_that_is_not_sent(pool: Callable[[int], Any]) -> None:
    message, _ = pool(2).run(_silent)
    assert message == "message from rank 1 to rank 0, of ranks 0, 1: rank 1 did not send it within 2 s"
