"""Read clips in workers, and stream the micro-batches of one rank."""

from collections.abc import Callable
from ctypes import c_char
from dataclasses import dataclass
from itertools import chain
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from opensora_cli.core.exceptions import FileProblem, HardwareError, OsoraError
from opensora_cli.core.formatting import plain
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batch_stream import BatchStream, WorkerEnded
from opensora_cli.data.batches import ClipBatch, ClipRequest, MicroBatch, Replacement
from opensora_cli.data.source import ClipSource
from opensora_cli.engine.encode.datasets import TableSource, open_table
from opensora_cli.engine.encode.unused_rows import find_unused
from opensora_cli.settings.data import DataSettings
from opensora_cli.settings.train import TrainSettings

_NOTE_BYTES = 512
_MOST_WARNINGS = 20

LoadClip = Callable[[ClipRequest], Any]
"""Function that replaces decoding, such as `ClipCache.clip`. Raises an `OsoraError` for a sample that it lacks."""


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
            paths=tuple(request.path for request in requests),
            captions=tuple(request.caption for request in requests),
            fps=tuple(request.fps for request in requests),
            motion_scores=tuple(request.motion_score for request in requests),
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


class ClipBatches(BatchStream[ClipBatch]):
    """Micro-batches of one rank, with warnings of unused samples and of samples that could not be read.

    Without a `source`, clips are those of the table. Workers call `load` instead of reading pixels; clips of the table
    then start with the first frame of their file. Raises the errors of `open_table`, and FileProblem if the data fill
    too few micro-batches for an update.
    """

    def __init__(
        self,
        settings: TrainSettings,
        *,
        data_rank: int,
        data_ranks: int,
        reporter: Reporter,
        load: LoadClip | None = None,
        source: ClipSource | None = None,
    ) -> None:
        data = settings.data
        if source is None:
            source = open_table(settings, fixed_starts=load is not None)
            if data_rank == 0:
                _warn_of_unused(data, source, reporter=reporter)
        self._notes = ReadingNotes(data.workers)
        self._replaced = ReplacementWarnings(reporter)
        super().__init__(
            source.plan_epoch,
            ClipLoader(source=source, load=load, notes=self._notes),
            fingerprint=source.fingerprint,
            micro_batches=settings.loop.micro_batches or data_ranks,
            rank=data_rank,
            ranks=data_ranks,
            workers=data.workers,
            prefetch=data.prefetch,
            warn=reporter.warn,
        )

    def next(self) -> ClipBatch:
        """Return the next micro-batch of this rank.

        Raises FileProblem if neither a sample nor a substitute can be read. Raises HardwareError, with the files that
        workers were reading, if a worker was killed or crashed.
        """
        try:
            batch = super().next()
        except WorkerEnded as error:
            raise HardwareError(
                f"{error.message}; last read were {', '.join(map(plain, self._notes.paths()))}",
                hint=f"{error.hint}; or one of these files crashes its decoder: take it out of the table",
            ) from error
        self._replaced.warn(batch)
        return batch


def _warn_of_unused(data: DataSettings, source: TableSource, *, reporter: Reporter) -> None:
    table, buckets, sampler = source.table, source.buckets, source.sampler()
    if bad := len(table.bad_rows):
        reporter.warn(f"{data.table}: bad rows skipped: {bad}; osora train --check-data lists them")
    for each in find_unused(source, np.ones(len(table), dtype=bool), sampler.assigned(0)):
        reporter.warn(
            f"{data.table}: rows unused: {each.rows} of {len(table)}, {each.reason} ({each.examples[0]}); "
            "osora train --check-data lists them with fixes"
        )
    batches = sampler(0).batches_of_buckets
    filled = {buckets[index].kind for index in np.flatnonzero(batches).tolist()}
    for resolution, lengths in data.buckets.items():
        for length, bucket in lengths.items():
            if bucket.probability > 0 and (resolution, length) not in filled:
                reporter.warn(f"data.buckets.{resolution}.{length} is empty: its samples fill no micro-batch")
