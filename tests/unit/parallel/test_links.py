import math
from unittest.mock import Mock

import pytest

from opensora_cli.parallel.scheduling import BandwidthMonitor, Link


def _measured(*pairs: tuple[int, float]) -> Link:
    link = Link()
    for nbytes, seconds in pairs:
        link.record(nbytes, seconds)
    return link


def test_latency_and_bandwidth_are_found() -> None:
    link = _measured(*((nbytes, 2e-5 + nbytes / 1e9) for nbytes in (1000, 10**6, 64, 10**7)))
    assert link.bandwidth_bytes_per_s == pytest.approx(1e9)
    assert link.latency_s == pytest.approx(2e-5)
    assert link.predicted_s(5 * 10**6) == pytest.approx(5.02e-3)
    assert (link.calls, link.nbytes, link.seconds) == (4, 11_001_064, pytest.approx(4 * 2e-5 + 0.011001064))


def test_what_is_long_ago_is_forgotten() -> None:
    slow = [(nbytes, nbytes / 1e6) for nbytes in (1000, 10**6)] * 5
    fast = [(nbytes, nbytes / 1e9) for nbytes in (1000, 10**6)]
    assert _measured(*slow, *fast * 2).bandwidth_bytes_per_s < 1e7
    assert _measured(*slow, *fast * 100).bandwidth_bytes_per_s == pytest.approx(1e9, rel=1e-3)


def test_one_size_gives_no_latency() -> None:
    link = _measured((1000, 1e-3), (1000, 3e-3))
    assert link.latency_s == 0.0
    # The newer one weighs 1, the older 0.9.
    assert link.bandwidth_bytes_per_s == pytest.approx(1000 / ((0.9 * 1e-3 + 3e-3) / 1.9))


def test_more_bytes_in_less_time_are_noise() -> None:
    link = _measured((10, 2e-3), (1000, 1e-3))
    assert link.bandwidth_bytes_per_s == math.inf
    assert link.predicted_s(10**9) == link.latency_s == pytest.approx((0.9 * 2e-3 + 1e-3) / 1.9)


def test_of_what_is_unknown_nothing_is_expected() -> None:
    assert Link().predicted_s(10**9) == 0.0


GROUP = Mock(group_name="3")


def test_a_slow_exchange_is_found_against_its_usual() -> None:
    monitor = BandwidthMonitor(known_after=5)
    monitor.name(GROUP, "ulysses")
    for nbytes in (10**6, 2 * 10**6) * 3:
        monitor.record(GROUP, nbytes, nbytes / 1e8)
    assert monitor.take() == ({"ulysses": pytest.approx(1e8)}, [])
    monitor.record(GROUP, 10**6, 0.5)
    # Longer in proportion only, or by little: both are usual.
    monitor.record(GROUP, 10**7, 0.1)
    rates, [slow] = monitor.take()
    assert rates == {"ulysses": pytest.approx(11e6 / 0.6)}
    assert slow == ("ulysses", 0.5, pytest.approx(0.01))
    assert monitor.take() == ({}, [])


def test_nothing_is_slow_before_the_usual_is_known() -> None:
    monitor = BandwidthMonitor(known_after=5)
    for seconds in (0.001, 1.0, 0.001, 9.0, 0.001):
        monitor.record(GROUP, 1000, seconds)
    rates, slow = monitor.take()
    assert list(rates) == ["3"]
    assert slow == []
