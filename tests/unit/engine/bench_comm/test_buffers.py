"""Which memory a benchmark takes, with a stand-in for NCCL. With a card it is tried in tests/gpu."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opensora_cli.engine.bench_comm import buffers
from opensora_cli.engine.bench_comm.buffers import PLAIN, REGISTERED, communication_buffers

CARD = torch.device("cuda", 0)


class _Backend:
    mem_allocator = "ncclMemAlloc"

    def __init__(self) -> None:
        self.registered: list[str] = []

    def register_mem_pool(self, pool: str) -> None:
        self.registered.append(pool)

    def deregister_mem_pool(self, pool: str) -> None:
        self.registered.remove(pool)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for CUDA; returns the pools that are in use."""
    pools: list[str] = []

    @contextmanager
    def use(pool: str, device: torch.device) -> Iterator[None]:
        pools.append(pool)
        yield
        pools.remove(pool)

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(buffers, "meet", lambda device, group: None)
    monkeypatch.setattr(buffers, "torch", SimpleNamespace(cuda=torch.cuda, tensor=lambda values, device: _Sum(values)))
    monkeypatch.setattr(buffers, "dist", SimpleNamespace(all_reduce=lambda total, group: total.add(group.lacking)))
    return pools


class _Sum:
    def __init__(self, values: list[int]) -> None:
        self.value = values[0]

    def add(self, others: int) -> None:
        self.value += others

    def __int__(self) -> int:
        return self.value


def _group(backend: Any, *, lacking: int = 0) -> Any:
    return SimpleNamespace(_get_backend=lambda device: backend, lacking=lacking)


def test_memory_is_registered_inside_the_block_only(used: list[str]) -> None:
    backend = _Backend()
    with communication_buffers(_group(backend), CARD) as kind:
        assert kind == REGISTERED
        assert used == backend.registered == ["pool of ncclMemAlloc"]
    assert used == backend.registered == []


def test_no_rank_takes_it_where_another_cannot(used: list[str]) -> None:
    backend = _Backend()
    with communication_buffers(_group(backend, lacking=1), CARD) as kind:
        assert kind == PLAIN
        assert used == []
    assert backend.registered == []


def test_a_backend_without_it(used: list[str]) -> None:
    with communication_buffers(_group(object()), CARD) as kind:
        assert kind == PLAIN
    assert used == []


def test_cpus_have_plain_memory() -> None:
    with communication_buffers(_group(None), torch.device("cpu")) as kind:
        assert kind == PLAIN
