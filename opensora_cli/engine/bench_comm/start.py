"""Which ranks a benchmark needs: how many processes to start here, and how each of them joins."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.progress import Reporter
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.bench_comm.bench import Show, bench_comm, check_picture
from opensora_cli.engine.bench_comm.report import BenchReport
from opensora_cli.engine.launch.launcher import LaunchRequest, launch, log_folder
from opensora_cli.engine.launch.rank import WatchedReporter, joined
from opensora_cli.settings.bench_comm import BenchCommSettings, BenchDevice

_RANKS_ON_CPU = 2


def device_type(device: BenchDevice) -> Literal["cpu", "cuda"]:
    """Return what `device` means on this machine."""
    if device is BenchDevice.AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if device is BenchDevice.CUDA else "cpu"


def ranks_to_start(settings: BenchCommSettings, *, log_dir: Path) -> LaunchRequest:
    """Return what to start on this machine.

    Args:
        settings: how many ranks, or that this is to be chosen.
        log_dir: folder for the log files of ranks.

    Raises:
        HardwareError: nothing was said, and there is one GPU.
    """
    parallel, device = settings.parallel, settings.device
    if device is BenchDevice.AUTO and (parallel.gpus or parallel.devices):
        device = BenchDevice.CUDA
    kind = device_type(device)
    if parallel.gpus is None and parallel.devices is None:
        gpus = torch.cuda.device_count() if kind == "cuda" else _RANKS_ON_CPU
        if gpus == 1:
            raise HardwareError(
                "this machine has one GPU, and one rank has no peer",
                hint="--device cpu shows that collectives work; torchrun and srun take the GPUs of several machines",
            )
    else:
        gpus = parallel.ranks_per_node
    return LaunchRequest.of(parallel, gpus=gpus, device_type=kind, log_dir=log_dir)


def start_ranks(settings: BenchCommSettings, arguments: Sequence[str]) -> None:
    """Run the benchmark in processes of its own, of which the first prints; return when all are done.

    Args:
        settings: what is measured.
        arguments: the command line of each rank, which means the same.

    Raises:
        OutputError: the picture could not be written.
        RequestError, HardwareError, RankFailure: as `launch`.
    """
    check_picture(settings)
    with log_folder("bench-comm") as log_dir:
        launch(ranks_to_start(settings, log_dir=log_dir), arguments)


def measure_as_rank(
    settings: BenchCommSettings,
    context: RankContext,
    *,
    environment: Mapping[str, str],
    reporter: Reporter,
    show: Show,
) -> BenchReport:
    """Join the other ranks and measure with them; see `bench_comm`.

    Args:
        settings: what is measured.
        context: which rank this is.
        environment: variables of this process, for the header.
        reporter: shown progress.
        show: gets each line of the table as soon as it is there.

    Raises:
        RequestError: there is one rank.
        HardwareError: there is no such GPU, or not all ranks came.
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
        )
