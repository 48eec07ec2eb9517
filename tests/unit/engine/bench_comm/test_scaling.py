"""Tables of how steps grow faster with the ranks."""

from collections.abc import Callable

import pytest

from opensora_cli.engine.bench_comm.counting import Traffic
from opensora_cli.engine.bench_comm.scaling import ranks_to_time, scaling_table
from opensora_cli.engine.bench_comm.timing import LatencyBandwidth
from opensora_cli.settings.enums import Collective, Scaling

FIT = LatencyBandwidth(latency_s=1e-3, seconds_per_byte=1e-9)


class _Work:
    """A step of 8 s that sends 1 GB from each rank in 100 calls."""

    name = "step"
    sends = Collective.ALL_TO_ALL

    def prepare(self, group: object, scaling: Scaling) -> Callable[[], object]:
        raise AssertionError("nothing is timed here")

    def traffic(self, ranks: int, scaling: Scaling) -> Traffic:
        return Traffic(ranks * 10**9, 100)


STRONG = {1: (8.0, Traffic(0, 0)), 2: (5.0, Traffic(2 * 10**9, 100))}


def test_one_two_four_and_all() -> None:
    assert ranks_to_time(1) == [1]
    assert ranks_to_time(2) == [1, 2]
    assert ranks_to_time(6) == [1, 2, 4, 6]
    assert ranks_to_time(8) == [1, 2, 4, 8]


def test_strong_scaling_and_its_prediction() -> None:
    table = scaling_table(_Work(), Scaling.STRONG, STRONG, fit=FIT, is_gloo=False)
    assert [(row.ranks, row.is_predicted) for row in table.rows] == [
        (1, False),
        (2, False),
        (4, True),
        (8, True),
        (16, True),
    ]
    alone, two, four, eight, _ = table.rows
    assert (alone.efficiency, alone.communication_share) == (1.0, 0.0)
    # 100 calls of 1 ms and 1 GB at 1 GB/s are 1.1 s of 5.
    assert two.communication_share == pytest.approx(1.1 / 5)
    assert two.efficiency == pytest.approx(8 / 2 / 5)
    assert four.step_s == pytest.approx(8 / 4 + 1.1)
    assert eight.step_s == pytest.approx(8 / 8 + 1.1)
    assert eight.efficiency == pytest.approx(1 / 2.1)


def test_weak_scaling_compares_with_the_same_time() -> None:
    measured = {1: (8.0, Traffic(0, 0)), 2: (10.0, Traffic(2 * 10**9, 100))}
    table = scaling_table(_Work(), Scaling.WEAK, measured, fit=FIT, is_gloo=False)
    assert table.rows[1].efficiency == pytest.approx(0.8)
    assert table.rows[2].step_s == pytest.approx(9.1)


def test_gloo_has_no_efficiency_anywhere() -> None:
    table = scaling_table(_Work(), Scaling.STRONG, STRONG, fit=FIT, is_gloo=True)
    assert all(row.efficiency is None for row in table.rows)
    assert table.to_json()["shows"] == "function"
    head, _, *rows, note = table.lines()
    assert head == "strong scaling of a step"
    assert "function, never efficiency" in note
    assert all(row.removesuffix("  predicted").endswith(" -") for row in rows)
