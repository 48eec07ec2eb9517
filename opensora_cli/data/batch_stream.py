"""Endless stream of micro-batches for one rank, prefetched by worker processes."""

import gc
import io
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from opensora_cli.core.exceptions import CheckpointError, FileProblem, HardwareError, OsoraError
from opensora_cli.core.formatting import plain
from opensora_cli.core.signals import blocked_in_children, leave_signals_to
from opensora_cli.data.batches import MicroBatch, PlanEpoch

T = TypeVar("T")

_KILLED = "DataLoader worker"
_LOCKS = 8
"""Upper limit of the locks that torch makes for each worker, and for all workers together."""


_MAX_COUNT = 2**31
_NO_SAMPLER_STATE = (
    "the checkpoint does not record where in the data the run was: {} of its sampler is missing or wrong"
)


class WorkerEnded(HardwareError):
    """Error of a killed or crashed worker process that reads clips."""


class BatchStream(Generic[T]):
    """This rank's micro-batches, epoch after epoch.

    An epoch is divided into groups of `micro_batches`. This rank has the micro-batches at `rank`, `rank + ranks`, ...
    of each group. An incomplete group at the end of an epoch is not used.

    Args:
        plan_epoch: the order of each epoch.
        load: picklable function that reads a micro-batch in a worker.
        fingerprint: hash of the data and of everything else that the order depends on.
        micro_batches: micro-batches of an update over all ranks, a multiple of `ranks`.
        workers: number of processes that read; 0 means this process.
        prefetch: micro-batches that each worker prefetches.
        warn: called when a state of other data is loaded.

    Raises:
        FileProblem: an epoch has too few micro-batches for one update.
    """

    def __init__(
        self,
        plan_epoch: PlanEpoch,
        load: Callable[[MicroBatch], T],
        *,
        fingerprint: str,
        micro_batches: int,
        rank: int,
        ranks: int,
        workers: int,
        prefetch: int,
        warn: Callable[[str], None],
    ) -> None:
        if micro_batches % ranks:
            raise ValueError(f"micro_batches={micro_batches} must be a multiple of ranks={ranks}")
        self._plan_epoch = plan_epoch
        self._load = load
        self._fingerprint = fingerprint
        self._micro_batches = micro_batches
        self._rank, self._ranks = rank, ranks
        self._workers, self._prefetch = workers, prefetch
        self._warn = warn
        # Position of the next update, and the number of its micro-batches that this rank has returned.
        self._epoch, self._position, self._number = 0, 0, 0
        self._begun = 0
        self._last_epoch = 0
        self._reading: Iterator[tuple[MicroBatch, T | OsoraError]] | None = None
        if (found := len(plan_epoch(0))) < micro_batches:
            raise FileProblem(
                f"an epoch has {found} micro-batches, and one update takes {micro_batches}",
                hint="osora train --check-data reports why: give more data, other data.buckets or fewer "
                "loop.micro_batches",
            )

    @property
    def epoch(self) -> int:
        """Epoch of the last returned micro-batch, counted from 0."""
        return self._last_epoch

    def next(self) -> T:
        """Return this rank's next micro-batch.
        Raises the error of `load`, WorkerEnded, or HardwareError if `/dev/shm` is full.
        """
        if self._reading is None:
            _require_locks(_LOCKS * (self._workers + 1) if self._workers else 0)
            with blocked_in_children(), _garbage_kept():
                self._reading = iter(self._data_loader())
            _kill_in_place_of_terminating(self._reading)
        try:
            asked, loaded = next(self._reading)
        except RuntimeError as error:
            if _KILLED not in str(error):
                raise
            raise WorkerEnded(
                f"a process that reads clips was ended from outside: {str(error).splitlines()[0]}",
                hint="memory may have run out: use fewer with --set data.workers=N, or less --set data.prefetch=N",
            ) from error
        if isinstance(loaded, OsoraError):
            raise loaded
        self._count(asked)
        return loaded

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last whole update, regardless of prefetched micro-batches.

        The values are plain, and do not depend on the number of ranks. An unfinished update counts as not started.
        """
        position = {"epoch": self._epoch, "position": self._position, "number": self._number}
        return {**position, "data": self._fingerprint}

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from a state, with the next epoch if the data changed. Raises CheckpointError if it is invalid."""
        epoch, position, number = (_count_in(state_dict, name) for name in ("epoch", "position", "number"))
        fingerprint = state_dict.get("data")
        if not isinstance(fingerprint, str):
            raise CheckpointError(_NO_SAMPLER_STATE.format("data"))
        self.close()
        if fingerprint != self._fingerprint:
            self._warn(f"the data have changed since the checkpoint: training goes on with epoch {epoch + 1} of them")
            epoch, position = epoch + 1, 0
        self._epoch, self._position, self._number = epoch, position, number
        self._last_epoch = epoch

    def close(self) -> None:
        """Stop the workers; idempotent. `next` then continues after the last whole update."""
        reading, self._reading = self._reading, None
        self._begun = 0
        shut_down = getattr(reading, "_shutdown_workers", None)
        if shut_down is not None:
            # Otherwise they stop when the iterator is collected, and an exception in progress delays that.
            shut_down()

    def _count(self, asked: MicroBatch) -> None:
        self._begun += self._ranks
        self._last_epoch = asked.epoch
        if self._begun == self._micro_batches:
            # The ranks after this one have the last micro-batches of the update.
            rest = self._ranks - self._rank
            self._epoch, self._position = asked.epoch, asked.position + rest
            self._number, self._begun = asked.number + rest, 0

    def _data_loader(self) -> "DataLoader[tuple[MicroBatch, T | OsoraError]]":
        return DataLoader(
            _Loading(self._load),
            sampler=self._upcoming(),
            batch_size=None,
            collate_fn=_as_is,
            num_workers=self._workers,
            prefetch_factor=self._prefetch if self._workers else None,
            # Ctrl-C and SIGTERM reach every process of a terminal or a job. The training process decides when the
            # workers stop.
            worker_init_fn=partial(_begin_worker, parent=os.getpid()),
            # A separate generator: torch's global one would also seed the workers.
            generator=torch.Generator(),
        )

    def _upcoming(self) -> Iterator[MicroBatch]:
        epoch, position, number = self._epoch, self._position, self._number
        while True:
            plan = self._plan_epoch(epoch)
            while position + self._micro_batches <= len(plan):
                for index in range(self._rank, self._micro_batches, self._ranks):
                    yield plan.batch(position + index, number=number + index, epoch=epoch)
                position += self._micro_batches
                number += self._micro_batches
            epoch, position = epoch + 1, 0


class _Loading(Dataset[tuple[MicroBatch, T | OsoraError]]):
    """Dataset that calls the loader, and returns errors of this package to the other process as values."""

    def __init__(self, load: Callable[[MicroBatch], T]) -> None:
        self._load = load

    def __getitem__(self, asked: MicroBatch) -> tuple[MicroBatch, T | OsoraError]:
        try:
            loaded = self._load(asked)
            if get_worker_info() is not None:
                _share_tensors(loaded)
            return asked, loaded
        except OsoraError as error:
            return asked, error


def _share_tensors(loaded: object) -> None:
    """Move all tensors in an object to memory that processes share. Raises HardwareError if there is no room.

    torch would do this in a thread, and only print its failure: the trainer would wait forever.
    """
    _Sharing(io.BytesIO()).dump(loaded)


class _Sharing(pickle.Pickler):
    def persistent_id(self, part: object) -> str | None:
        if not isinstance(part, Tensor):
            return None
        try:
            part.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise _no_shared_memory(error) from error
        return "shared"


def _count_in(state: object, name: str) -> int:
    """Return a number of a state. Raises CheckpointError if the state is invalid or lacks the number."""
    value = state.get(name) if isinstance(state, dict) else None
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise CheckpointError(_NO_SAMPLER_STATE.format(name))
    return value


def _require_locks(count: int) -> None:
    """Raise HardwareError if there is no room for `count` locks, before torch fails after making some of them."""
    try:
        [multiprocessing.Lock() for _ in range(count)]
    except OSError as error:
        raise _no_shared_memory(error) from error


def _no_shared_memory(error: Exception) -> HardwareError:
    return HardwareError(
        f"/dev/shm has no room for what the processes that read clips hand over: {plain(str(error).splitlines()[0])}",
        hint="make room there (docker run --shm-size=8g), or read without further processes: --set data.workers=0",
    )


def _as_is(value: T) -> T:
    return value


def _begin_worker(worker: int, *, parent: int) -> None:
    leave_signals_to(parent)


def _kill_in_place_of_terminating(reading: object) -> None:
    """Make torch and the exit handler send SIGKILL to workers that do not stop: the workers ignore SIGTERM."""
    for worker in getattr(reading, "_workers", ()):
        worker._popen.terminate = worker._popen.kill


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Keep processes that are forked inside the block from collecting objects of this process.

    Objects that own threads, such as video decoders, hang when they are destroyed in a forked process, which lacks
    these threads.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
