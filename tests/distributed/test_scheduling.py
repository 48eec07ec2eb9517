"""Queued collectives over real processes: one order, right results, and no order of waiting that hangs."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from opensora_cli.parallel.mesh import MeshShape, ParallelMesh
from opensora_cli.parallel.scheduling import BandwidthMonitor, CommunicationScheduler, Handle

_SIZES = (5000, 10, 300, 300, 70000, 1)


class _Log:
    """A scheduler that remembers in which order its collectives are issued."""

    def __init__(self, monitor: BandwidthMonitor) -> None:
        assert dist.group.WORLD is not None
        self.scheduler = CommunicationScheduler(dist.group.WORLD, monitor)
        self.issued: list[int] = []

    def submit(self, number: int, tensor: Tensor, group: dist.ProcessGroup) -> Handle:
        def start() -> dist.Work:
            self.issued.append(number)
            return dist.all_reduce(tensor, group=group, async_op=True)

        return self.scheduler.submit(start, tensor, group=group)


def _opposed() -> tuple[list[int], list[int]]:
    """Return the order of issue over three groups, of which ranks have learned opposite things, and this rank's own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pairs = ParallelMesh(MeshShape(replicate=ranks // 2, tensor=2), device_type="cpu").group("tensor")
    groups = [dist.new_group(list(range(ranks))), pairs, dist.new_group(list(range(ranks)))]
    monitor = BandwidthMonitor()
    for index, group in enumerate(groups):
        for nbytes in (100, 10**5):
            monitor.link(group).record(nbytes, 1e-4 + nbytes * 2.0 ** (index if rank else -index))
    log = _Log(monitor)
    handles = [log.submit(index, torch.ones(4), group) for index, group in enumerate(groups)]
    log.scheduler.flush()
    assert len(log.issued) == 3
    for group, handle in zip(groups, handles, strict=True):
        assert handle.wait().tolist() == [float(group.size())] * 4
    seconds = [monitor.link(group).predicted_s(16) for group in groups]
    return log.issued, sorted(range(3), key=seconds.__getitem__)


def _any_order(seed: int) -> list[int]:
    """Wait in an order of this rank's own, and in between submit more: no two ranks do the same."""
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None
    monitor = BandwidthMonitor()
    monitor.link(world).record(100, 1e-3)
    log = _Log(monitor)
    chance = random.Random(100 * seed + rank)
    waiting: dict[int, Handle] = {}
    for number, size in enumerate(_SIZES):
        waiting[number] = log.submit(number, torch.full((size,), float(number)), world)
        while waiting and chance.random() < 0.4:
            _check(*waiting.popitem())
    for number in chance.sample(sorted(waiting), len(waiting)):
        _check(number, waiting[number])
    return log.issued


def _check(number: int, handle: Handle) -> None:
    expected = torch.full((_SIZES[number],), float(number * dist.get_world_size()))
    assert torch.equal(handle.wait(), expected)
    assert handle.wait() is handle.wait()


def _measured() -> tuple[int, int, bool]:
    assert dist.group.WORLD is not None
    monitor = BandwidthMonitor()
    for _ in range(2):
        with monitor.measure(dist.group.WORLD, 400, device="cpu"):
            dist.all_reduce(torch.ones(100))
    link = monitor.link(dist.group.WORLD)
    return link.calls, link.nbytes, link.seconds > 0.0


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_issue_in_the_order_of_the_first(pool: Callable[[int], Any], ranks: int) -> None:
    answers = pool(ranks).run(_opposed)
    assert answers[0] == ([2, 1, 0], [2, 1, 0])
    assert answers[1:] == [([2, 1, 0], [0, 1, 2])] * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_order_of_waiting_hangs(pool: Callable[[int], Any], ranks: int) -> None:
    seen = set()
    for seed in range(12):
        orders = pool(ranks).run(_any_order, seed)
        assert sorted(orders[0]) == list(range(len(_SIZES)))
        assert orders == [orders[0]] * ranks
        seen.add(tuple(orders[0]))
    assert len(seen) > 3


def test_measuring(pool: Callable[[int], Any]) -> None:
    assert pool(2).run(_measured) == [(2, 800, True)] * 2
