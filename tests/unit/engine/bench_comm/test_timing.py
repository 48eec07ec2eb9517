"""The fit of times, and which memory a benchmark takes: with a stand-in for NCCL here, with a GPU in tests/gpu."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opensora_cli.engine.bench_comm import timing
from opensora_cli.engine.bench_comm.timing import PLAIN, REGISTERED, communication_buffers, fit_latency_bandwidth

GPU = torch.device("cuda", 0)
SIZES = [8.0 * 2**power for power in range(28)]


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
    monkeypatch.setattr(timing, "meet", lambda device, group: None)
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=torch.cuda, tensor=lambda values, device: _Sum(values)))
    monkeypatch.setattr(timing, "dist", SimpleNamespace(all_reduce=lambda total, group: total.add(group.lacking)))
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
    with communication_buffers(_group(backend), GPU) as kind:
        assert kind == REGISTERED
        assert used == backend.registered == ["pool of ncclMemAlloc"]
    assert used == backend.registered == []


def test_no_rank_takes_it_where_another_cannot(used: list[str]) -> None:
    backend = _Backend()
    with communication_buffers(_group(backend, lacking=1), GPU) as kind:
        assert kind == PLAIN
        assert used == []
    assert backend.registered == []


def test_a_backend_without_it(used: list[str]) -> None:
    with communication_buffers(_group(object()), GPU) as kind:
        assert kind == PLAIN
    assert used == []


def test_cpus_have_plain_memory() -> None:
    with communication_buffers(_group(None), torch.device("cpu")) as kind:
        assert kind == PLAIN


def test_an_exact_line_is_found() -> None:
    fit = fit_latency_bandwidth(SIZES, [5e-6 + size / 100e9 for size in SIZES])
    assert fit.latency_s == pytest.approx(5e-6)
    assert fit.bandwidth_gb_per_s == pytest.approx(100)
    assert fit.seconds(1e9, collectives=3) == pytest.approx(15e-6 + 0.01)


def test_noise_of_ten_percent_moves_it_little() -> None:
    rng = random.Random(0)
    fit = fit_latency_bandwidth(SIZES, [(5e-6 + size / 100e9) * rng.uniform(0.9, 1.1) for size in SIZES])
    assert fit.latency_s == pytest.approx(5e-6, rel=0.1)
    assert fit.bandwidth_gb_per_s == pytest.approx(100, rel=0.1)


def test_nothing_becomes_negative() -> None:
    falling = fit_latency_bandwidth([1.0, 2.0, 3.0], [3.0, 2.0, 1.0])
    assert falling.seconds_per_byte == 0
    assert falling.bandwidth_gb_per_s is None
    assert 1 < falling.latency_s < 3

    steep = fit_latency_bandwidth([1.0, 2.0, 4.0], [1.0, 4.0, 16.0])
    assert steep.latency_s == 0
    assert steep.seconds_per_byte > 0


def test_one_size_is_all_latency() -> None:
    fit = fit_latency_bandwidth([64.0, 64.0], [2.0, 2.0])
    assert (fit.latency_s, fit.seconds_per_byte) == (2.0, 0.0)
