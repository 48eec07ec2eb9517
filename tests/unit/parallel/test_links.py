import math

import pytest

from opensora_cli.parallel.scheduling import Link


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
