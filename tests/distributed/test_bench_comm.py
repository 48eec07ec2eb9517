"""`bench_comm` over real processes: right data, faults that are found, and bytes that equal their formula."""

import json
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from sent_bytes import counted_bytes
from torch import Tensor

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.bench_comm import run as bench
from opensora_cli.engine.bench_comm import scaling as scaling_steps
from opensora_cli.engine.bench_comm.operations import Place, bus_factor, make_operation
from opensora_cli.engine.bench_comm.run import BenchReport, affordable_bytes, bench_comm
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset
from opensora_cli.settings.tools import BenchCommSettings, Collective, Scaling

CPU = torch.device("cpu")
SIZES = (1, 7_000)
SLOW = pytest.mark.slow
both = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SLOW)])


def _place() -> Place:
    assert dist.group.WORLD is not None
    return Place(dist.group.WORLD, CPU)


def _all_operations() -> list[tuple[str, int, int, int]]:
    place = _place()
    found = []
    for collective in Collective:
        for size in SIZES:
            operation = make_operation(collective, place, size, torch.float32)
            with counted_bytes() as sent:
                operation.run()
            found.append((collective.value, operation.size_bytes, operation.count_wrong(), sent.num_bytes))
    return found


@both
def test_every_collective_is_right_and_sends_what_its_bus_bandwidth_counts(pool, ranks):
    answers = pool(ranks).run(_all_operations)
    for of_ranks in zip(*answers, strict=True):
        names, sizes, wrongs, sents = zip(*of_ranks, strict=True)
        assert len(set(names)) == len(set(sizes)) == 1
        collective, size = Collective(names[0]), sizes[0]
        assert sum(wrongs) == 0, collective
        assert size % (4 * ranks) == 0 or collective in (
            Collective.ALL_REDUCE,
            Collective.BROADCAST,
            Collective.SEND_RECV,
        )
        # A broadcast is passed on by all but the last rank; all else loads the ranks alike.
        parts = ranks - 1 if collective is Collective.BROADCAST else ranks
        expected = parts * bus_factor(collective, ranks) * size
        assert sum(sents) == pytest.approx(expected)
    assert len(answers[0]) == len(Collective) * len(SIZES)


def _bench_with_a_fault() -> tuple[int, str, str]:
    place, real = _place(), dist.broadcast

    def faulty(values: Tensor, *args: Any, **kwargs: Any) -> None:
        real(values, *args, **kwargs)
        if place.rank == 1 and values.nbytes == 32:
            values[3] = 7.5

    settings = BenchCommSettings(max_bytes=64, iters=1, collectives=(Collective.BROADCAST, Collective.SEND_RECV))
    with patch.object(dist, "broadcast", faulty):
        report, _ = _bench(settings)
    assert {row.size_bytes for row in report.rows if row.wrong} == {32}
    with pytest.raises(HardwareError) as failure:
        report.raise_for_problems()
    return failure.value.exit_code, failure.value.message, report.verdicts[0].judgement.value


def test_every_rank_fails_with_exit_code_4_where_one_has_a_wrong_element(pool):
    expected = (4, "1 element arrived wrong in broadcast", "wrong data")
    assert pool(2).run(_bench_with_a_fault) == [expected, expected]


def _small_demo(*_: object, **__: object) -> GenerateSettings:
    sizes = {"hidden_size": 64, "axes_dim": (4, 6, 6), "depth": 1, "depth_single_blocks": 1}
    return load_preset("demo", prompt="any").replace({f"model.{name}": size for name, size in sizes.items()})


# The whole command.


def _bench(settings: BenchCommSettings, *, free: int | None = None) -> tuple[BenchReport, list[list[str]]]:
    shown: list[list[str]] = []
    with (
        patch.object(scaling_steps, "load_preset", _small_demo),
        patch.object(bench, "affordable_bytes", affordable_bytes if free is None else lambda place: free),
    ):
        place = _place()
        report = bench_comm(
            settings,
            group=place.group,
            device=CPU,
            show=shown.append,
        )
    json.dumps(report.to_json(), allow_nan=False)
    return report, shown


def _whole_bench() -> tuple[BenchReport, list[list[str]]]:
    return _bench(BenchCommSettings(min_bytes=128, max_bytes=512, iters=2, warmup=2, scaling=Scaling.STRONG))


@pytest.mark.slow
def test_the_whole_benchmark(pool):
    (report, shown), (other, _) = pool(2).run(_whole_bench)
    own: dict[str, object] = {"scaling": None}
    assert other.model_copy(update=own) == report.model_copy(update=own)
    rows = {collective: [row for row in report.rows if row.collective is collective] for collective in Collective}
    for collective, of_one in rows.items():
        assert len(of_one) == 3, collective
        assert all(row.wrong == 0 and row.repeats in (1, 2) for row in of_one)
        assert all(0 < row.min_s <= row.p50_s <= row.p99_s for row in of_one)
    assert {verdict.judgement.value for verdict in report.verdicts} == {"works"}
    assert len(report.verdicts) == len(Collective)
    # All but the verdicts was shown while it was made: the header, then each row by itself.
    assert [len(lines) for lines in shown[1:]] == [1] * len(report.rows)
    assert [*chain.from_iterable(shown), *report.closing_lines()] == report.lines()
    assert report.scaling is not None
    assert [(row.ranks, row.efficiency) for row in report.scaling.rows] == [(1, None), (2, None)]
    assert report.scaling.rows[0].step_s > 0


def _short_of_memory(min_bytes: int) -> tuple[list[int], tuple[str, ...]]:
    """Return the sizes and the notes of a benchmark with 100 bytes of free memory."""
    sizes = {"min_bytes": min_bytes, "max_bytes": 2**40, "iters": 1, "warmup": 2}
    report, _ = _bench(BenchCommSettings(**sizes, collectives=(Collective.BROADCAST,)), free=100)
    return [row.size_bytes for row in report.rows], report.notes


def _too_short_of_memory() -> None:
    with pytest.raises(HardwareError, match=r"^min_bytes=128 needs 2 buffers on each rank"):
        _short_of_memory(128)


def test_sizes_over_the_free_memory_are_cut_with_a_note_or_refused(pool):
    note = f"sizes end at 64 bytes, not at {2**40}: memory is not free for more"
    assert pool(2).run(_short_of_memory, 8) == [([8, 16, 32, 64], (note,))] * 2
    pool(2).run(_too_short_of_memory)
