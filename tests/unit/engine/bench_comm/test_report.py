"""Table of scaling."""

from opensora_cli.engine.bench_comm.scaling import ScalingRow, ScalingTable
from opensora_cli.settings.tools import Scaling


def test_the_table_has_efficiency_only_where_it_means_something() -> None:
    alone = ScalingRow(ranks=1, step_s=8.0, efficiency=1.0)
    two = ScalingRow(ranks=2, step_s=5.0, efficiency=None)
    head, _, *rows = ScalingTable(scaling=Scaling.STRONG, rows=(alone, two)).lines()
    assert head == "strong scaling of a denoising step"
    assert [row.split() for row in rows] == [["1", "8000.00", "100.0%"], ["2", "5000.00", "-"]]
