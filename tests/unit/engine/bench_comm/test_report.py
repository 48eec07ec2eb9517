"""Reports, tables and charts."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.bench_comm.links import Expectation, Judgement, Verdict
from opensora_cli.engine.bench_comm.measure import Times
from opensora_cli.engine.bench_comm.report import BenchReport, Row
from opensora_cli.engine.bench_comm.run import doubling_sizes
from opensora_cli.engine.bench_comm.scaling import ScalingRow, ScalingTable
from opensora_cli.engine.bench_comm.topology import Header, HostLinks
from opensora_cli.settings.tools import Collective, Scaling

NVLINK = Expectation(link="NVLink 4 x18", gb_per_s=450, stream_gb_per_s=450, good_share=0.7, source="NVIDIA")


def _row(collective: Collective, size: int, *, factor: float, wrong: int = 0) -> Row:
    seconds = 1e-5 + size / 300e9
    return Row(
        collective=collective,
        size_bytes=size,
        dtype="float32",
        repeats=20,
        min_s=seconds / 2,
        avg_s=seconds,
        p50_s=seconds,
        p99_s=2 * seconds,
        algorithm_bandwidth_gb_per_s=size / seconds / 1e9,
        bus_bandwidth_gb_per_s=size / seconds / 1e9 * factor,
        wrong=wrong,
        wire_bytes=size * factor,
    )


def _report(*, backend: str = "nccl", wrong: int = 0) -> BenchReport:
    host = HostLinks(name="<node>&", ranks=(0, 1, 2, 3), devices=("cuda:0 H100",) * 4)
    rows = [_row(Collective.ALL_REDUCE, size, factor=1.5) for size in doubling_sizes(8, 2**30)]
    rows += [_row(Collective.BROADCAST, size, factor=1.0, wrong=wrong) for size in (8, 16)]
    verdict = Verdict(
        collective=Collective.ALL_REDUCE,
        judgement=Judgement.GOOD,
        bus_bandwidth_gb_per_s=360,
        expected_gb_per_s=None if backend == "gloo" else 450,
        reason="",
    )
    return BenchReport(
        header=Header(
            backend=backend,
            versions={"torch": "2.13"},
            ranks=4,
            hosts=(host,),
            environment={"NCCL_DEBUG": "INFO"},
            inside=NVLINK,
            between=None,
        ),
        shows="function" if backend == "gloo" else "speed",
        rows=tuple(rows),
        verdicts=(verdict,),
        wrong=sum(row.wrong for row in rows),
    )


def test_times() -> None:
    times = Times.of([float(second) for second in range(200, 0, -1)])
    assert (times.min_s, times.avg_s, times.p50_s, times.p99_s) == (1, 100.5, 100, 198)
    assert Times.of([3.0]) == Times(min_s=3, avg_s=3, p50_s=3, p99_s=3)


def test_a_wrong_element_is_exit_code_4() -> None:
    _report().raise_for_problems()
    with pytest.raises(HardwareError, match="6 elements arrived wrong in broadcast") as failure:
        _report(wrong=3).raise_for_problems()
    assert failure.value.exit_code == 4


@pytest.mark.parametrize(
    ("backend", "shown", "absent"),
    [
        ("nccl", ["all_reduce", "broadcast", "expected 450 GB/s", "nccl: 4 ranks"], "function"),
        pytest.param("gloo", ["function, not speed"], "expected", marks=pytest.mark.slow),
    ],
)
def test_the_chart_has_curves_and_what_links_should_give_but_on_gloo(
    tmp_path: Path, backend: str, shown: list[str], absent: str
) -> None:
    path = tmp_path / "links.svg"
    _report(backend=backend).write_plot(str(path), replace=False)
    texts = " ".join(text.text or "" for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text"))
    assert [text for text in shown if text not in texts] == []
    assert absent not in texts


def test_the_table_has_efficiency_only_where_it_means_something() -> None:
    alone = ScalingRow(ranks=1, step_s=8.0, sent_bytes=0, efficiency=1.0)
    two = ScalingRow(ranks=2, step_s=5.0, sent_bytes=2**20, efficiency=None)
    head, _, *rows = ScalingTable(step="training step", scaling=Scaling.STRONG, rows=(alone, two)).lines()
    assert head == "strong scaling of a training step"
    assert [row.split() for row in rows] == [["1", "8000.00", "0.000", "100.0%"], ["2", "5000.00", "1.000", "-"]]
