"""Functions for ranks: joining the others, and reporting progress to the launcher."""

import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook

from opensora_cli.core.device import device_count, has_gpu, use_device
from opensora_cli.core.device_names import GPU, type_of
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.formatting import escaped
from opensora_cli.core.progress import BYTES, Reporter, StageProgress
from opensora_cli.core.rank_link import beat, move
from opensora_cli.core.rank_messages import broadcast_json
from opensora_cli.core.ranks import RankContext
from opensora_cli.core.section import Section
from opensora_cli.parallel.mesh import use_mesh
from opensora_cli.parallel.rendezvous import init_with_retry
from opensora_cli.settings.devices import DeviceSettings


class _Settings(Protocol):
    """Settings of a run on several devices."""

    @property
    def parallel(self) -> DeviceSettings: ...

    def replace(self, changes: Mapping[str, object], /) -> Self: ...


S = TypeVar("S", bound=_Settings)
M = TypeVar("M", bound=Section)

TIMEOUT_S = 600.0


def device_type(device: str) -> str:
    """Return the device type of ranks for the setting `device`, which may have an index."""
    if device == "auto":
        return GPU if has_gpu() else "cpu"
    return type_of(device)


def rank_counts(context: RankContext) -> dict[str, object]:
    """Return the settings for the number of ranks that torchrun or Slurm has started."""
    return {"parallel.gpus": context.world_size // context.nnodes, "parallel.nnodes": context.nnodes}


def settings_of_ranks(settings: S, context: RankContext) -> S:
    """Return settings with the number of ranks that were started, also by torchrun or Slurm.
    Raises RequestError if the settings need another number.
    """
    parallel = settings.parallel
    if parallel.gpus is None and parallel.devices is None and parallel.nnodes == 1:
        return settings.replace(rank_counts(context))
    if parallel.world_size != context.world_size:
        raise RequestError(
            f"{parallel.world_size} devices are asked for, and {context.world_size} ranks were started",
            hint="drop --gpus where torchrun or srun starts the ranks",
        )
    return settings


def rank_device(context: RankContext, device_type: str) -> torch.device:
    """Return the device of a rank: the GPU with its local number, or the only GPU that it sees.
    Raises HardwareError if it sees fewer GPUs.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    count = device_count(device_type)
    if context.local_rank < count:
        return torch.device(device_type, context.local_rank)
    if count == 1:  # as Slurm assigns them with --gpus-per-task=1
        return torch.device(device_type, 0)
    raise HardwareError(
        f"rank {context.rank} is number {context.local_rank} on {socket.gethostname()}, which has {count} usable GPUs",
        hint="start no more ranks on a machine than it has GPUs",
    )


@contextmanager
def joined(context: RankContext, *, device_type: str, timeout_s: float = TIMEOUT_S) -> Iterator[torch.device]:
    """Join the other ranks, yield the device of this rank, and leave the group at the end of the block.

    If the block fails, the rank does not leave: its process must report the cause first, and then end. Leaving would
    close connections, and the other ranks would report that before the cause is known. With NCCL it can also hang.

    Joining, and a collective without all ranks, fail after `timeout_s`. The time between two steps has shorter
    limits, see `rank_link.beat`. Raises HardwareError if the GPU is missing, or not all ranks joined in time.
    """
    device = rank_device(context, device_type)
    use_device(device)
    beat("join")
    init_with_retry(device_type, context, timeout_s=timeout_s, report=log_wait if context.log is None else None)
    # A first evaluation may take minutes. Each module call is a sign of progress.
    with register_module_forward_hook(lambda *_: move()):
        yield device
    use_mesh(None)
    dist.destroy_process_group()


def log_wait(text: str) -> None:
    """Print on standard error what a rank waits for, on every rank because no other rank knows it."""
    print(escaped(text), file=sys.stderr, flush=True)


def agreed(settings: M) -> M:
    """Return the settings of rank 0 on all ranks."""
    return settings.model_validate(broadcast_json(settings.model_dump(mode="json")))


class WatchedReporter:
    """Reporter that forwards to `reporter`, and reports each stage and the time of its steps to the launcher.

    From the second step of a stage on, no step may take longer than `rank_link.linked` allows. Other times have no
    limit while there are signs of work: the first step includes warm-up, work of any kind may follow the last step,
    and disks may be slow. `on_device` names the stages that compute on the rank's device.
    """

    def __init__(
        self, reporter: Reporter, *, on_device: Collection[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.note, self.warn = reporter.note, reporter.warn
        self._reporter, self._on_device, self._clock = reporter, on_device, clock

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Run a stage, and report its steps to the launcher."""
        on_device = name in self._on_device
        beat(name, on_device=on_device)
        with self._reporter.stage(name, total=total, unit=unit) as progress:
            yield progress if unit == BYTES else _WatchedStage(name, progress, total, on_device, self._clock)
        beat(name)


class _WatchedStage:
    def __init__(
        self, name: str, progress: StageProgress, total: int | None, on_device: bool, clock: Callable[[], float]
    ) -> None:
        self._name, self._progress, self._left = name, progress, total
        self._on_device, self._clock = on_device, clock
        self._last, self._longest_s = clock(), 0.0

    def advance(self, amount: int = 1) -> None:
        now = self._clock()
        self._longest_s = max(self._longest_s, now - self._last)
        self._last = now
        if self._left is not None:
            self._left -= amount
        is_last = self._left is not None and self._left <= 0
        beat(self._name, None if is_last else self._longest_s, on_device=self._on_device)
        self._progress.advance(amount)
