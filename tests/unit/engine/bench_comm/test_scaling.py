"""Numbers of ranks at which steps are timed, and their table."""

from opensora_cli.engine.bench_comm.scaling import ScalingRow, ScalingTable, ranks_to_time
from opensora_cli.settings.enums import Scaling


def test_one_two_four_and_all() -> None:
    assert ranks_to_time(1) == [1]
    assert ranks_to_time(2) == [1, 2]
    assert ranks_to_time(6) == [1, 2, 4, 6]
    assert ranks_to_time(8) == [1, 2, 4, 8]


def test_the_table_has_efficiency_only_where_it_means_something() -> None:
    alone = ScalingRow(ranks=1, step_s=8.0, sent_bytes=0, efficiency=1.0)
    two = ScalingRow(ranks=2, step_s=5.0, sent_bytes=2**20, efficiency=None)
    head, _, *rows = ScalingTable(step="training step", scaling=Scaling.STRONG, rows=(alone, two)).lines()
    assert head == "strong scaling of a training step"
    assert [row.split() for row in rows] == [["1", "8000.00", "0.000", "100.0%"], ["2", "5000.00", "1.000", "-"]]
