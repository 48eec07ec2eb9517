"""`osora bench-comm`: start the ranks, join them, and measure with all of them."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist

from opensora_cli.core.device import device_count, free_and_total_bytes, is_accelerator
from opensora_cli.core.device_names import GPU
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.bench_comm.links import Verdict, expected_bandwidth, judge
from opensora_cli.engine.bench_comm.operations import BUFFERS, Operation, Place, bus_factor, make_operation, measure
from opensora_cli.engine.bench_comm.scaling import ScalingTable, measure_scaling
from opensora_cli.engine.bench_comm.topology import Header, gather_header
from opensora_cli.engine.launch.launcher import LaunchRequest, launch, log_folder
from opensora_cli.engine.launch.rank import WatchedReporter, device_type, joined
from opensora_cli.settings.tools import BenchCommSettings, Collective

Show = Callable[[Sequence[str]], None]

_RANKS_ON_CPU = 2
_DTYPE = torch.float32
"""Default of nccl-tests."""
_USABLE = 0.4
"""Share of the free memory for buffers. torch caches those of smaller sizes, together as large again."""
_HEADROOM = 256 * 2**20
"""Bytes for the check and the buffers of the backend."""
_SCALING_STEPS = 20


TABLE_HEAD = (
    f"{'collective':<16}{'size (B)':>11}{'dtype':>9}{'avg (us)':>10}{'p99 (us)':>10}"
    f"{'algbw':>8}{'busbw':>8}{'#wrong':>7}"
)
"""Bandwidths in GB/s, as nccl-tests print them. JSON also has the least and the median time."""


class Row(Document):
    """Times and rates of one collective at one size."""

    collective: Collective
    size_bytes: int
    dtype: str
    repeats: int
    min_s: float
    avg_s: float
    p50_s: float
    p99_s: float
    algorithm_bandwidth_gb_per_s: float
    """Size divided by the mean time."""
    bus_bandwidth_gb_per_s: float
    """Rate on the slowest link, comparable between numbers of ranks (nccl-tests, doc/PERFORMANCE.md)."""
    wrong: int
    """Wrong elements of all ranks."""

    def line(self) -> str:
        cells = "".join(f"{seconds * 1e6:>10.1f}" for seconds in (self.avg_s, self.p99_s))
        rates = f"{self.algorithm_bandwidth_gb_per_s:>8.2f}{self.bus_bandwidth_gb_per_s:>8.2f}"
        return f"{self.collective:<16}{self.size_bytes:>11}{self.dtype:>9}{cells}{rates}{self.wrong:>7}"


class BenchReport(Document):
    """Report of a benchmark, in the schema `osora.bench-comm/5`."""

    SCHEMA: ClassVar[str | None] = "osora.bench-comm/5"

    header: Header
    shows: str
    """`speed`, or `function` on gloo."""
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    scaling: ScalingTable | None = None
    wrong: int
    """Wrong elements in all rows."""
    notes: tuple[str, ...] = ()

    def raise_for_problems(self) -> None:
        """Raise HardwareError if any element was wrong."""
        if self.wrong:
            names = ", ".join(dict.fromkeys(row.collective.value for row in self.rows if row.wrong))
            raise HardwareError(
                f"{self.wrong} element{'s' if self.wrong > 1 else ''} arrived wrong in {names}",
                hint="trust no result over these links: try NCCL_P2P_DISABLE=1, then have the hardware checked",
            )

    def lines(self) -> list[str]:
        return [*self.header.lines(), "", TABLE_HEAD, *(row.line() for row in self.rows), *self.closing_lines()]

    def closing_lines(self) -> list[str]:
        """Return the lines below the table."""
        found = ["", *(f"verdict     {verdict.line()}" for verdict in self.verdicts)]
        if self.scaling is not None:
            found += ["", *self.scaling.lines()]
        return [*found, *(f"note        {note}" for note in self.notes)]


def start_ranks(settings: BenchCommSettings, arguments: Sequence[str]) -> None:
    """Run the benchmark in processes of its own, of which the first prints; return when all are done.

    `arguments` are the command line of each rank, which means the same as `settings`. Raises HardwareError if no ranks
    are given and there is one GPU, and what `launch` raises.
    """
    parallel = settings.parallel
    is_given = parallel.gpus is not None or parallel.devices is not None
    kind = device_type(GPU if settings.device == "auto" and is_given else settings.device)
    ranks = parallel.ranks_per_node
    if not is_given:
        ranks = device_count(kind) if kind != "cpu" else _RANKS_ON_CPU
        if ranks == 1:
            raise HardwareError(
                "this machine has one GPU, and one rank has no peer",
                hint="--device cpu shows that collectives work; torchrun and srun take the GPUs of several machines",
            )
    with log_folder("bench-comm") as log_dir:
        launch(LaunchRequest(parallel=parallel, gpus=ranks, device_type=kind, log_dir=log_dir), arguments)


def measure_as_rank(
    settings: BenchCommSettings,
    context: RankContext,
    *,
    reporter: Reporter,
    show: Show,
) -> BenchReport:
    """Join the other ranks and measure with them; see `bench_comm`.
    Raises RequestError if there is one rank, and HardwareError if there is no such GPU, or not all ranks came.
    """
    if context.world_size == 1:
        raise RequestError("one rank has no peer", hint="start at least two, as with --gpus 2")
    with joined(context, device_type=device_type(settings.device)) as device:
        assert dist.group.WORLD is not None
        return bench_comm(
            settings,
            group=dist.group.WORLD,
            device=device,
            reporter=WatchedReporter(reporter),
            show=show,
        )


def bench_comm(
    settings: BenchCommSettings,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    reporter: Reporter | None = None,
    show: Show | None = None,
) -> BenchReport:
    """Measure what `settings` ask for; all 2 or more ranks of the group call this.

    `show` gets the header and each row as soon as it is measured. Raises HardwareError if not even the smallest size
    fits into memory.
    """
    reporter, show = reporter or SilentReporter(), show or (lambda lines: None)
    place = Place(group, device)
    header = gather_header(group, device)
    show([*header.lines(), "", TABLE_HEAD])
    found, notes = _measure_all(settings, place, reporter, show)
    table = None
    if settings.scaling is not None:
        kind, steps = settings.scaling, min(settings.iters, _SCALING_STEPS)
        with reporter.stage("scaling"):
            table = measure_scaling(kind, group=group, device=device, steps=steps, is_gloo=header.is_gloo)
    rows = tuple(row for of_one in found.values() for row in of_one)
    return BenchReport(
        header=header,
        shows="function" if header.is_gloo else "speed",
        rows=rows,
        verdicts=tuple(_verdict(header, of_one) for of_one in found.values()),
        scaling=table,
        wrong=sum(row.wrong for row in rows),
        notes=tuple(notes),
    )


def _measure_all(
    settings: BenchCommSettings, place: Place, reporter: Reporter, show: Show
) -> tuple[dict[Collective, list[Row]], list[str]]:
    """Return the rows of each collective, and notes on skipped sizes."""
    asked = settings.largest_bytes(on_gpu=is_accelerator(place.device))
    largest = min(asked, affordable_bytes(place))
    sizes: list[int] = []
    while settings.min_bytes << len(sizes) <= largest:
        sizes.append(settings.min_bytes << len(sizes))
    if not sizes:
        raise HardwareError(
            f"min_bytes={settings.min_bytes} needs {BUFFERS} buffers on each rank, and memory is free for "
            f"sizes up to {largest}",
            hint="ask for a smaller size, or close what else uses the memory",
        )
    notes = []
    if largest < asked:
        notes.append(f"sizes end at {sizes[-1]} bytes, not at {asked}: memory is not free for more")
    found: dict[Collective, list[Row]] = {}
    for collective in dict.fromkeys(settings.collectives):
        rows = found.setdefault(collective, [])
        with reporter.stage(collective.value, total=len(sizes)) as progress:
            for size in sizes:
                operation = make_operation(collective, place, size, _DTYPE)
                # The smallest sizes may all be one element for each rank.
                if not rows or operation.size_bytes != rows[-1].size_bytes:
                    rows.append(_row(collective, operation, settings, place))
                    show([rows[-1].line()])
                progress.advance()
    return found, notes


def _row(collective: Collective, operation: Operation, settings: BenchCommSettings, place: Place) -> Row:
    seconds = measure(
        operation.run, warmup=settings.warmup, iters=settings.iters, device=place.device, group=place.group
    )
    wrong = torch.tensor(operation.count_wrong(), dtype=torch.int64, device=place.device)
    dist.all_reduce(wrong, group=place.group)
    mean_s, (p50_s, p99_s) = fmean(seconds), np.percentile(seconds, (50, 99), method="inverted_cdf").tolist()
    bandwidth = operation.size_bytes / mean_s / 1e9
    return Row(
        collective=collective,
        size_bytes=operation.size_bytes,
        dtype=str(operation.dtype).removeprefix("torch."),
        repeats=len(seconds),
        min_s=min(seconds),
        avg_s=mean_s,
        p50_s=p50_s,
        p99_s=p99_s,
        algorithm_bandwidth_gb_per_s=bandwidth,
        bus_bandwidth_gb_per_s=bandwidth * bus_factor(collective, place.ranks),
        wrong=int(wrong),
    )


def affordable_bytes(place: Place) -> int:
    """Return the largest size for which all ranks have memory, the same on all of them."""
    # Ranks of one host share its memory; here all are counted, since more hosts have more.
    free, sharing = free_and_total_bytes(place.device)[0], 1 if is_accelerator(place.device) else place.ranks
    own = int((free * _USABLE / sharing - _HEADROOM) / BUFFERS)
    least = torch.tensor([own], dtype=torch.int64, device=place.device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=place.group)
    return max(int(least), 0)


def _verdict(header: Header, rows: Sequence[Row]) -> Verdict:
    collective = rows[0].collective
    return judge(
        collective,
        best_gb_per_s=max(row.bus_bandwidth_gb_per_s for row in rows),
        largest_bytes=max(row.size_bytes for row in rows),
        wrong=sum(row.wrong for row in rows),
        is_gloo=header.is_gloo,
        expected=expected_bandwidth(
            collective, inside=header.inside, between=header.between, ranks=header.ranks, hosts=len(header.hosts)
        ),
    )
