"""Times, and the table of scaling."""

from opensora_cli.engine.bench_comm.operations import Times
from opensora_cli.engine.bench_comm.scaling import ScalingRow, ScalingTable
from opensora_cli.settings.tools import Scaling


def test_times() -> None:
    times = Times.of([float(second) for second in range(200, 0, -1)])
    assert (times.min_s, times.avg_s, times.p50_s, times.p99_s) == (1, 100.5, 100, 198)
    assert Times.of([3.0]) == Times(min_s=3, avg_s=3, p50_s=3, p99_s=3)


def test_the_table_has_efficiency_only_where_it_means_something() -> None:
    alone = ScalingRow(ranks=1, step_s=8.0, efficiency=1.0)
    two = ScalingRow(ranks=2, step_s=5.0, efficiency=None)
    head, _, *rows = ScalingTable(step="training step", scaling=Scaling.STRONG, rows=(alone, two)).lines()
    assert head == "strong scaling of a training step"
    assert [row.split() for row in rows] == [["1", "8000.00", "100.0%"], ["2", "5000.00", "-"]]
