"""Read clips in worker processes: an endless, resumable stream of one rank's micro-batches."""

import gc
import io
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_char
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing.sharedctypes import RawArray
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from opensora_cli.core.exceptions import CheckpointError, FileProblem, HardwareError, OsoraError
from opensora_cli.core.formatting import plain
from opensora_cli.core.progress import Reporter
from opensora_cli.core.signals import blocked_in_children, leave_signals_to
from opensora_cli.data.batches import ClipBatch, ClipRequest, MicroBatch, PlanEpoch, Replacement
from opensora_cli.data.source import ClipSource

T = TypeVar("T")

LoadClip = Callable[[ClipRequest], Any]
"""Function that replaces decoding, such as `ClipCache.clip`. Raises an `OsoraError` for a sample that it lacks."""

_KILLED = "DataLoader worker"
_LOCKS = 8
"""Upper limit of the locks that torch makes for each worker, and for all workers together."""
_MAX_COUNT = 2**31
_NO_SAMPLER_STATE = (
    "the checkpoint does not record where in the data the run was: {} of its sampler is missing or wrong"
)
_NOTE_BYTES = 512
_MOST_WARNINGS = 20


class ReadingNotes:
    """Path that each worker reads, in shared memory: a decoder that crashes cannot name its file."""

    def __init__(self, workers: int) -> None:
        self._notes = [RawArray(c_char, _NOTE_BYTES) for _ in range(workers)]

    def note(self, path: str) -> None:
        """Note the path that this process reads, if it is a worker."""
        worker = get_worker_info()
        if worker is not None:
            # The end of a long path says more than its beginning.
            self._notes[worker.id].value = path.encode("utf-8", "surrogateescape")[-_NOTE_BYTES:]

    def paths(self) -> list[str]:
        """Return the last path of each worker."""
        return [note.value.decode("utf-8", "replace") for note in self._notes if note.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipLoader:
    """Reader of micro-batches.

    The first readable substitute of a micro-batch replaces a sample that cannot be read. It is the same in every run,
    so a resumed run repeats an uninterrupted one.
    """

    source: ClipSource
    load: LoadClip | None
    """Function that replaces decoding; None reads pixels."""
    notes: ReadingNotes

    def __call__(self, asked: MicroBatch) -> ClipBatch:
        """Read one micro-batch; raises FileProblem if neither a sample nor a substitute can be read."""
        substitutes = iter(asked.substitutes)
        requests, contents, replaced = list[ClipRequest](), list[Any](), list[Replacement]()
        for place, own in enumerate(asked.samples):
            failures: list[tuple[str, str]] = []
            for sample in chain([own], substitutes):
                request = self.source.request(sample, bucket=asked.bucket, number=asked.number, place=place)
                self.notes.note(request.path)
                try:
                    content = self.source.read(request) if self.load is None else self.load(request)
                    break
                except OsoraError as error:
                    failures.append((request.path, error.message))
                except Exception as error:
                    error.add_note(f"while reading {request.path}")
                    raise
            else:
                path, reason = failures[0]
                raise FileProblem(
                    f"{reason} (sample {path}; {len(failures) - 1} others of its bucket cannot be read in its place)",
                    hint="osora data scan makes a table without broken files",
                )
            replaced += [Replacement(path=path, reason=reason, by=request.path) for path, reason in failures]
            requests.append(request)
            contents.append(content)
        return ClipBatch(
            number=asked.number,
            epoch=asked.epoch,
            requests=tuple(requests),
            pixels_BTHWC=torch.stack(contents) if self.load is None else None,
            cached=None if self.load is None else tuple(contents),
            replaced=tuple(replaced),
        )


class ReplacementWarnings:
    """Warnings of samples that could not be read: once for each, and for the first twenty.

    `where` ends each warning, such as ` in validation`.
    """

    def __init__(self, reporter: Reporter, *, where: str = "") -> None:
        self._reporter = reporter
        self._where = where
        self._warned: set[str] = set()

    def warn(self, batch: ClipBatch) -> None:
        """Warn of the samples that were replaced in a micro-batch."""
        for replacement in batch.replaced:
            if replacement.path in self._warned or len(self._warned) > _MOST_WARNINGS:
                continue
            self._warned.add(replacement.path)
            text = f"{replacement.reason}: {replacement.by} takes its place{self._where}"
            if len(self._warned) > _MOST_WARNINGS:
                text = f"more samples cannot be read{self._where}: osora data scan makes a table without them"
            self._reporter.warn(text)


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
        check: called with each micro-batch that `next` returns.
        last_read: function that returns the files that workers read last.

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
        check: Callable[[T], None] = lambda batch: None,
        last_read: Callable[[], list[str]] = list,
    ) -> None:
        if micro_batches % ranks:
            raise ValueError(f"micro_batches={micro_batches} must be a multiple of ranks={ranks}")
        self._plan_epoch = plan_epoch
        self._load = load
        self._fingerprint = fingerprint
        self._micro_batches = micro_batches
        self._rank, self._ranks = rank, ranks
        self._workers, self._prefetch = workers, prefetch
        self._warn, self._check, self._last_read = warn, check, last_read
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

        Raises the error of `load`, and HardwareError if a worker was killed or crashed, or if `/dev/shm` is full.
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
            paths = ", ".join(map(plain, self._last_read()))
            files = f"; last read were {paths}" if paths else ""
            raise HardwareError(
                f"a process that reads clips was ended from outside: {str(error).splitlines()[0]}{files}",
                hint="memory may have run out: use fewer with --set data.workers=N, or less --set data.prefetch=N; or "
                "one of these files crashes its decoder: take it out of the table",
            ) from error
        if isinstance(loaded, OsoraError):
            raise loaded
        self._count(asked)
        self._check(loaded)
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
            epoch, position = epoch + 1, 0
            self._warn(f"the data have changed since the checkpoint: training continues at the start of epoch {epoch}")
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
