"""Read clips in worker processes: an endless, resumable stream of one rank's micro-batches."""

import errno
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from ctypes import c_char
from functools import partial
from itertools import chain
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from opensora_cli.core.exceptions import CheckpointError, FileProblem, HardwareError, OsoraError
from opensora_cli.core.formatting import plain
from opensora_cli.core.progress import Reporter
from opensora_cli.core.signals import blocked_in_children, leave_signals_to
from opensora_cli.data.batches import ClipBatch, ClipRequest, ClipSource, MicroBatch, Replacement

LoadClip = Callable[[ClipRequest], Any]
"""Function that replaces decoding, such as `ClipCache.clip`. Raises an `OsoraError` for a sample that it lacks."""

_KILLED = "DataLoader worker"
_MAX_COUNT = 2**31
_NOTE_BYTES = 512
_MOST_WARNINGS = 20

Loaded = tuple[MicroBatch, ClipBatch | OsoraError]


class ClipReader(Dataset[Loaded]):
    """Reader of micro-batches in this process or in workers, which get a copy.

    The first readable substitute of a micro-batch replaces a sample that cannot be read. It is the same in every run,
    so a resumed run repeats an uninterrupted one. `load` replaces decoding; None reads pixels.
    """

    def __init__(self, source: ClipSource, load: LoadClip | None, *, workers: int = 0) -> None:
        self._source = source
        self._load = load
        # Path that each worker reads, in shared memory: a decoder that crashes cannot name its file.
        self._notes = [RawArray(c_char, _NOTE_BYTES) for _ in range(workers)]

    def __getitem__(self, asked: MicroBatch) -> Loaded:
        """Read for a `DataLoader`: errors of this package reach the other process as values."""
        try:
            batch = self.read(asked)
            if get_worker_info() is not None:
                share(batch)
            return asked, batch
        except OsoraError as error:
            return asked, error

    def read(self, asked: MicroBatch) -> ClipBatch:
        """Read one micro-batch; raises FileProblem if neither a sample nor a substitute can be read."""
        substitutes = iter(asked.substitutes)
        requests, contents, replaced = list[ClipRequest](), list[Any](), list[Replacement]()
        for place, own in enumerate(asked.samples):
            failures: list[tuple[str, str]] = []
            for sample in chain([own], substitutes):
                request = self._source.request(sample, bucket=asked.bucket, number=asked.number, place=place)
                if (worker := get_worker_info()) is not None:
                    # The end of a long path says more than its beginning.
                    self._notes[worker.id].value = request.path.encode("utf-8", "surrogateescape")[-_NOTE_BYTES:]
                try:
                    content = self._source.read(request) if self._load is None else self._load(request)
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
            pixels_BTHWC=torch.stack(contents) if self._load is None else None,
            cached=None if self._load is None else tuple(contents),
            replaced=tuple(replaced),
        )

    def last_paths(self) -> list[str]:
        """Return the last path of each worker."""
        return [note.value.decode("utf-8", "replace") for note in self._notes if note.value]


class ReplacementWarnings:
    """Warnings of samples that could not be read: once for each, and for the first twenty.

    `where` ends each warning, such as ` in validation`.
    """

    def __init__(self, reporter: Reporter, *, where: str = "") -> None:
        self._reporter, self._where = reporter, where
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


class BatchStream:
    """This rank's micro-batches, epoch after epoch.

    An epoch is divided into groups of `micro_batches`. This rank has the micro-batches at `rank`, `rank + ranks`, ...
    of each group. An incomplete group at the end of an epoch is not used. `load` replaces decoding, and is picklable.
    Each of `workers` processes prefetches micro-batches; 0 reads in this process. Raises FileProblem if an epoch has
    too few micro-batches for one update.
    """

    def __init__(
        self,
        source: ClipSource,
        *,
        load: LoadClip | None = None,
        micro_batches: int,
        rank: int = 0,
        ranks: int = 1,
        workers: int,
        prefetch: int,
        reporter: Reporter,
    ) -> None:
        if micro_batches % ranks:
            raise ValueError(f"micro_batches={micro_batches} must be a multiple of ranks={ranks}")
        self._source = source
        self._reader = ClipReader(source, load, workers=workers)
        self._micro_batches = micro_batches
        self._rank, self._ranks = rank, ranks
        self._workers, self._prefetch = workers, prefetch
        self._reporter = reporter
        self._replacements = ReplacementWarnings(reporter)
        # Position of the next update, and the number of its micro-batches that this rank has returned.
        self._epoch, self._position, self._number = 0, 0, 0
        self._begun = 0
        self._last_epoch = 0
        self._reading: Iterator[Loaded] | None = None
        if (found := len(source.plan_epoch(0))) < micro_batches:
            raise FileProblem(
                f"an epoch has {found} micro-batches, and one update takes {micro_batches}",
                hint="osora train --check-data reports why: give more data, other data.buckets or fewer "
                "loop.micro_batches",
            )

    @property
    def epoch(self) -> int:
        """Epoch of the last returned micro-batch, counted from 0."""
        return self._last_epoch

    def next(self) -> ClipBatch:
        """Return this rank's next micro-batch.

        Raises the error of a clip, and HardwareError if a worker was killed or crashed, or if `/dev/shm` is full.
        """
        try:
            if self._reading is None:
                self._reading = self._start_reading()
            asked, loaded = next(self._reading)
        except RuntimeError as error:
            if _KILLED not in str(error):
                raise
            paths = ", ".join(map(plain, self._reader.last_paths()))
            files = f"; last read were {paths}" if paths else ""
            raise HardwareError(
                f"a process that reads clips was ended from outside: {str(error).splitlines()[0]}{files}",
                hint="memory may have run out: use fewer with --set data.workers=N, or less --set data.prefetch=N; or "
                "one of these files crashes its decoder: take it out of the table",
            ) from error
        if isinstance(loaded, OsoraError):
            raise loaded
        self._begun += self._ranks
        self._last_epoch = asked.epoch
        if self._begun == self._micro_batches:
            # The ranks after this one have the last micro-batches of the update.
            rest = self._ranks - self._rank
            self._epoch, self._position = asked.epoch, asked.position + rest
            self._number, self._begun = asked.number + rest, 0
        self._replacements.warn(loaded)
        return loaded

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last whole update, regardless of prefetched micro-batches.

        The values are plain, and do not depend on the number of ranks. An unfinished update counts as not started.
        """
        position = {"epoch": self._epoch, "position": self._position, "number": self._number}
        return {**position, "data": self._source.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, with the next epoch if the data changed. Raises CheckpointError if it is invalid."""
        counts = [state_dict.get(name) for name in ("epoch", "position", "number")]
        epoch, position, number = (count if type(count) is int and 0 <= count <= _MAX_COUNT else -1 for count in counts)
        fingerprint = state_dict.get("data")
        if min(epoch, position, number) < 0 or not isinstance(fingerprint, str):
            raise CheckpointError(
                "the checkpoint does not record where in the data the run was: epoch, position, number or data of its "
                "sampler is missing or wrong"
            )
        self.close()
        if fingerprint != self._source.fingerprint:
            epoch, position = epoch + 1, 0
            self._reporter.warn(
                f"the data have changed since the checkpoint: training continues at the start of epoch {epoch}"
            )
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

    def _start_reading(self) -> Iterator[Loaded]:
        loader = DataLoader(
            self._reader,
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
        others = multiprocessing.active_children()
        # Workers must not collect objects of this process that own threads, such as video decoders: without these
        # threads, which a fork leaves behind, they hang when they are destroyed.
        gc.freeze()
        try:
            with blocked_in_children():
                reading = iter(loader)
        except OSError as error:
            # Python would wait forever for the workers that were started: they ignore its request to end.
            for worker in multiprocessing.active_children():
                if worker not in others:
                    worker.kill()
            if error.errno != errno.ENOSPC:
                raise
            raise _no_shared_memory(error) from error
        finally:
            gc.unfreeze()
        # Torch and the exit handler must send SIGKILL to workers that do not stop: the workers ignore SIGTERM.
        for worker in getattr(reading, "_workers", ()):
            worker._popen.terminate = worker._popen.kill
        return reading

    def _upcoming(self) -> Iterator[MicroBatch]:
        epoch, position, number = self._epoch, self._position, self._number
        while True:
            plan = self._source.plan_epoch(epoch)
            while position + self._micro_batches <= len(plan):
                for index in range(self._rank, self._micro_batches, self._ranks):
                    yield plan.batch(position + index, number=number + index, epoch=epoch)
                position += self._micro_batches
                number += self._micro_batches
            epoch, position = epoch + 1, 0


def share(batch: ClipBatch) -> None:
    """Move the tensors of a batch to memory that processes share. Raises HardwareError if there is no room.

    torch would do this in a thread, and only print its failure: the trainer would wait forever.
    """
    tensors = [] if batch.pixels_BTHWC is None else [batch.pixels_BTHWC]
    for clip in batch.cached or ():
        tensors += clip.values() if isinstance(clip, Mapping) else ()
    try:
        for tensor in tensors:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise _no_shared_memory(error) from error


def _no_shared_memory(error: Exception) -> HardwareError:
    return HardwareError(
        f"/dev/shm has no room for what the processes that read clips hand over: {plain(str(error).splitlines()[0])}",
        hint="make room there (docker run --shm-size=8g), or read without further processes: --set data.workers=0",
    )


def _begin_worker(worker: int, *, parent: int) -> None:
    leave_signals_to(parent)
