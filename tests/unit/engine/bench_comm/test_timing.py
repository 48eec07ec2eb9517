"""The latency and bandwidth that are fitted to times."""

import random

import pytest

from opensora_cli.engine.bench_comm.timing import fit_latency_bandwidth

SIZES = [8.0 * 2**power for power in range(28)]


def test_an_exact_line_is_found() -> None:
    fit = fit_latency_bandwidth(SIZES, [5e-6 + size / 100e9 for size in SIZES])
    assert fit.latency_s == pytest.approx(5e-6)
    assert fit.bandwidth_gb_per_s == pytest.approx(100)


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
