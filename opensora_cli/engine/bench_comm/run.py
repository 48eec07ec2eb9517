"""`osora bench-comm`: start the ranks, join them, and measure with all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from opensora_cli.core.device import device_count, free_and_total_bytes, is_accelerator
from opensora_cli.core.device_names import GPU
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.files import require_writable
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.bench_comm.links import Verdict, expected_bandwidth, judge
from opensora_cli.engine.bench_comm.measure import counted_bytes, measure
from opensora_cli.engine.bench_comm.operations import BUFFERS, BUILDERS, Operation, Place, bus_factor
from opensora_cli.engine.bench_comm.report import TABLE_HEAD, BenchReport, Row
from opensora_cli.engine.bench_comm.scaling import measure_scaling
from opensora_cli.engine.bench_comm.topology import Header, gather_header
from opensora_cli.engine.launch.launcher import LaunchRequest, launch, log_folder
from opensora_cli.engine.launch.rank import WatchedReporter, device_type, joined
from opensora_cli.media.plots import new_figure
from opensora_cli.parallel.exchanges import TwoStages
from opensora_cli.parallel.mesh import stage_groups
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


def start_ranks(settings: BenchCommSettings, arguments: Sequence[str]) -> None:
    """Run the benchmark in processes of its own, of which the first prints; return when all are done.

    `arguments` are the command line of each rank, which means the same as `settings`. Raises OutputError or
    HardwareError if the chart could not be written, HardwareError if no ranks are given and there is one GPU, and what
    `launch` raises.
    """
    check_plot(settings)
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
    environment: Mapping[str, str],
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
            environment=environment,
            reporter=WatchedReporter(reporter),
            show=show,
            ranks_per_machine=context.world_size // context.nnodes,
        )


def bench_comm(
    settings: BenchCommSettings,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    environment: Mapping[str, str],
    reporter: Reporter | None = None,
    show: Show | None = None,
    ranks_per_machine: int | None = None,
) -> BenchReport:
    """Measure what `settings` ask for; all 2 or more ranks of the group call this, and the first writes the chart.

    The `ranks_per_machine` are the inner stage of hierarchical exchanges; None means that all ranks are on one machine,
    whose halves then stand for two. The header shows variables of `environment`. `show` gets the header and each row as
    soon as it is measured. Raises OutputError if the chart exists already, or cannot be written, and
    HardwareError if not even the smallest size fits into memory, or matplotlib is missing.
    """
    writes = settings.plot is not None and dist.get_rank(group) == 0
    if writes:
        check_plot(settings)
    reporter, show = reporter or SilentReporter(), show or (lambda lines: None)
    place, place_notes = _place(settings, group, device, ranks_per_machine or group.size())
    header = gather_header(group, device, environment=environment)
    show([*header.lines(), "", TABLE_HEAD])
    found, notes = _measure_all(settings, place, reporter, show)
    tables = []
    if settings.scaling is not None:
        with reporter.stage("scaling"):
            table = measure_scaling(
                settings.scaling,
                group=group,
                device=device,
                steps=min(settings.iters, _SCALING_STEPS),
                is_gloo=header.is_gloo,
            )
            tables.append(table)
    rows = tuple(row for of_one in found.values() for row in of_one)
    report = BenchReport(
        header=header,
        shows="function" if header.is_gloo else "speed",
        rows=rows,
        verdicts=tuple(_verdict(header, of_one) for of_one in found.values()),
        scaling=tuple(tables),
        wrong=sum(row.wrong for row in rows),
        notes=(*place_notes, *notes),
        files={"plot": settings.plot} if settings.plot else {},
    )
    if writes and settings.plot is not None:
        report.write_plot(settings.plot, replace=settings.overwrite)
    return report


def check_plot(settings: BenchCommSettings) -> None:
    """Check that the chart can be written, before anything is measured.
    Raises OutputError as `require_writable`, and HardwareError if matplotlib is missing.
    """
    if settings.plot is None:
        return
    new_figure()
    require_writable(Path(settings.plot), overwrite=settings.overwrite)


def doubling_sizes(smallest: int, largest: int) -> list[int]:
    """Return the sizes from `smallest` on, each twice the one before, up to `largest`."""
    sizes = []
    while smallest <= largest:
        sizes.append(smallest)
        smallest *= 2
    return sizes


def _measure_all(
    settings: BenchCommSettings, place: Place, reporter: Reporter, show: Show
) -> tuple[dict[Collective, list[Row]], list[str]]:
    """Return the rows of each collective, and notes on skipped sizes."""
    asked = settings.largest_bytes(on_gpu=is_accelerator(place.device))
    largest = min(asked, affordable_bytes(place))
    sizes = doubling_sizes(settings.min_bytes, largest)
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
        if collective is Collective.HIERARCHICAL and place.two_stages is None:
            continue
        rows = found.setdefault(collective, [])
        with reporter.stage(collective.value, total=len(sizes)) as progress:
            for size in sizes:
                operation = BUILDERS[collective](place, size, _DTYPE)
                # The smallest sizes may all be one element for each rank.
                if not rows or operation.size_bytes != rows[-1].size_bytes:
                    rows.append(_row(collective, operation, settings, place))
                    show([rows[-1].line()])
                progress.advance()
    return found, notes


def _row(collective: Collective, operation: Operation, settings: BenchCommSettings, place: Place) -> Row:
    times, repeats = measure(
        operation.run, warmup=settings.warmup, iters=settings.iters, device=place.device, group=place.group
    )
    with counted_bytes() as sent:
        operation.run()
    counts = torch.tensor([operation.count_wrong(), sent.num_bytes], dtype=torch.int64, device=place.device)
    dist.all_reduce(counts, group=place.group)
    wrong, sent_bytes = counts.tolist()
    bandwidth = operation.size_bytes / times.avg_s / 1e9
    return Row(
        collective=collective,
        **asdict(times),
        size_bytes=operation.size_bytes,
        dtype=str(operation.dtype).removeprefix("torch."),
        repeats=repeats,
        algorithm_bandwidth_gb_per_s=bandwidth,
        bus_bandwidth_gb_per_s=bandwidth * bus_factor(collective, place.ranks),
        wrong=wrong,
        wire_bytes=sent_bytes / place.ranks,
    )


def _place(
    settings: BenchCommSettings, group: dist.ProcessGroup, device: torch.device, ranks_per_machine: int
) -> tuple[Place, list[str]]:
    """Return where operations run, and how the hierarchical one divides the ranks; all ranks call it."""
    if Collective.HIERARCHICAL not in settings.collectives:
        return Place(group, device), []
    ranks, inner, notes = group.size(), ranks_per_machine, []
    if inner == ranks and ranks % 2 == 0:
        inner = ranks // 2
        notes.append(f"hierarchical divides one machine as if it were two of {inner} ranks each")
    if inner == 1 or ranks % inner:
        return Place(group, device), [f"hierarchical is skipped: {ranks} ranks are not equal parts of several each"]
    return Place(group, device, TwoStages(*stage_groups([dist.get_process_group_ranks(group)], inner=inner))), notes


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
