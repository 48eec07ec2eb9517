"""Functions for ranks: joining the others through a store, and reporting progress to the launcher."""

import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not marked so
from torch.nn.modules.module import register_module_forward_hook

from opensora_cli.core.device import collective_backends, device_count, has_gpu, use_device
from opensora_cli.core.device_names import GPU, type_of
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.formatting import first_few
from opensora_cli.core.progress import BYTES, Reporter, StageProgress
from opensora_cli.core.rank_messages import broadcast_json
from opensora_cli.core.ranks import RankContext, beat, move
from opensora_cli.core.section import Section
from opensora_cli.parallel.mesh import libraries_on_stderr, use_mesh

if TYPE_CHECKING:
    from opensora_cli.settings.generate import GenerateSettings
    from opensora_cli.settings.train import TrainSettings

S = TypeVar("S", "GenerateSettings", "TrainSettings")
M = TypeVar("M", bound=Section)

TIMEOUT_S = 600.0
_CONNECT_S = 10.0
_PAUSE_S = 0.2
_NOTICE_S = 10.0
_RETRY_HINT = "see what became of the other ranks, and start the run again"


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
    limits, see `ranks.beat`. Raises HardwareError if the GPU is missing, or not all ranks joined in time.
    """
    device = rank_device(context, device_type)
    use_device(device)
    beat("join")
    init_with_retry(device_type, context, timeout_s=timeout_s)
    # A first evaluation may take minutes. Each module call is a sign of progress.
    with register_module_forward_hook(lambda *_: move()):
        yield device
    use_mesh(None)
    dist.destroy_process_group()


def agreed(settings: M) -> M:
    """Return the settings of rank 0 on all ranks."""
    return settings.model_validate(broadcast_json(settings.model_dump(mode="json")))


class WatchedReporter:
    """Reporter that forwards to `reporter`, and reports each stage and the time of its steps to the launcher.

    From the second step of a stage on, steps have a timeout, see `process.SILENCE_S`. The first step includes
    warm-up, and work of any kind may follow the last step.
    """

    def __init__(self, reporter: Reporter, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.note, self.warn = reporter.note, reporter.warn
        self._reporter, self._clock = reporter, clock

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Run a stage, and report its steps to the launcher. Disks may be slow: reading has no steps."""
        beat(name)
        with self._reporter.stage(name, total=total, unit=unit) as progress:
            yield progress if unit == BYTES else _WatchedStage(name, progress, total, self._clock)
        beat(name)


class _WatchedStage:
    def __init__(self, name: str, progress: StageProgress, total: int | None, clock: Callable[[], float]) -> None:
        self._name, self._progress, self._left, self._clock = name, progress, total, clock
        self._last, self._longest_s = clock(), 0.0

    def advance(self, amount: int = 1) -> None:
        now = self._clock()
        self._longest_s, self._last = max(self._longest_s, now - self._last), now
        if self._left is not None:
            self._left -= amount
        is_last = self._left is not None and self._left <= 0
        beat(self._name, None if is_last else self._longest_s)
        self._progress.advance(amount)


def init_with_retry(device_type: str, context: RankContext, *, timeout_s: float = TIMEOUT_S) -> None:
    """Join the other ranks and create the default group like `dist.init_process_group`, with retries.

    Without a file store, rank 0 opens the store once, unless torchrun has it, and the others retry the connection.
    `device_type` chooses gloo or NCCL. `timeout_s` is the timeout of collectives and of the rendezvous.

    Raises:
        HardwareError: The store cannot be reached, or not all ranks arrived.
    """
    rank, world_size, limit = context.rank, context.world_size, timedelta(seconds=timeout_s)
    deadline_s = time.monotonic() + timeout_s
    store: Store
    if context.store is not None:
        # Without the number of ranks, torch does not remove the file. The launcher removes it.
        store = FileStore(str(context.store))
    elif rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = _opened_store(context, limit)
    else:
        store = _reached_store(context, deadline_s)
    store.set_timeout(limit)
    try:
        with libraries_on_stderr():
            if context.log is None:
                _wait_for_all(store, context, deadline_s)
            # Its functions store the current default group as a default argument. After a later import, they would keep
            # gloo's threads alive, and a thread that frees a tensor while Python ends aborts the process.
            importlib.import_module("torch.distributed.nn.functional")
            dist.init_process_group(
                collective_backends(device_type), store=store, rank=rank, world_size=world_size, timeout=limit
            )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise HardwareError(
            f"rank {rank} of {world_size}: the ranks did not meet: {reason}", hint=_RETRY_HINT
        ) from error


def _opened_store(context: RankContext, limit: timedelta) -> TCPStore:
    try:
        # It listens on all interfaces, and connects to itself: the address of the others may lead elsewhere.
        return TCPStore("localhost", context.master_port, is_master=True, timeout=limit, wait_for_workers=False)
    except dist.DistError as error:
        reason = " ".join(str(error).split())[:200]
        raise HardwareError(
            f"rank 0: cannot listen at port {context.master_port}: {reason}",
            hint="set MASTER_PORT to a free port, on all ranks",
        ) from error


def _reached_store(context: RankContext, deadline_s: float) -> TCPStore:
    host, port = context.master_addr, context.master_port
    while True:
        try:
            # TCPStore prints the stack of its errors, and signals have no effect while it connects.
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
            return TCPStore(host, port, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False)
        except (OSError, dist.DistError) as error:
            if time.monotonic() >= deadline_s:
                raise HardwareError(
                    f"rank {context.rank}: no answer from {host}:{port}, where rank 0 or its launcher listens",
                    hint="check that the first machine runs, its address and port, and the firewall between",
                ) from error
        time.sleep(_PAUSE_S)


def _wait_for_all(store: Store, context: RankContext, deadline_s: float) -> None:
    """Wait until all ranks are present. Raises HardwareError, which names the missing ranks, at the deadline, and
    RuntimeError if the store is lost.
    """
    store.set(f"here/{context.rank}", "")
    missing, notice_s = list(range(context.world_size)), time.monotonic() + _NOTICE_S
    # Signals have no effect during `store.wait`.
    while missing := [rank for rank in missing if not store.check([f"here/{rank}"])]:
        named = f"{'rank' if len(missing) == 1 else 'ranks'} {first_few([str(rank) for rank in missing])}"
        if time.monotonic() >= deadline_s:
            raise HardwareError(f"rank {context.rank}: {named} did not come in time", hint=_RETRY_HINT)
        if time.monotonic() >= notice_s and context.rank == min({*range(context.world_size)} - {*missing}):
            notice_s = deadline_s
            print(f"rank {context.rank}: waiting for {named}", file=sys.stderr, flush=True)
        time.sleep(_PAUSE_S)
