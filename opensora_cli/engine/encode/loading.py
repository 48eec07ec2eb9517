"""Open the micro-batches of a training run."""

import numpy as np

from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import ClipBatch
from opensora_cli.data.loading import BatchStream, ClipLoader, LoadClip, ReadingNotes, ReplacementWarnings
from opensora_cli.data.source import ClipSource
from opensora_cli.engine.encode.datasets import TableSource, open_table
from opensora_cli.engine.encode.unused_rows import find_unused
from opensora_cli.settings.data import DataSettings
from opensora_cli.settings.train import TrainSettings


def open_batches(
    settings: TrainSettings,
    *,
    data_rank: int,
    data_ranks: int,
    reporter: Reporter,
    load: LoadClip | None = None,
    source: ClipSource | None = None,
) -> BatchStream[ClipBatch]:
    """Return the micro-batches of one rank, with warnings of unused samples and of samples that could not be read.

    Without a `source`, clips are those of the table. Workers call `load` instead of reading pixels; clips of the table
    then start with the first frame of their file. Raises the errors of `open_table`, and FileProblem if the data fill
    too few micro-batches for an update.
    """
    data = settings.data
    if source is None:
        source = open_table(settings, fixed_starts=load is not None)
        if data_rank == 0:
            _warn_of_unused(data, source, reporter=reporter)
    notes = ReadingNotes(data.workers)
    return BatchStream(
        source.plan_epoch,
        ClipLoader(source=source, load=load, notes=notes),
        fingerprint=source.fingerprint,
        micro_batches=settings.loop.micro_batches or data_ranks,
        rank=data_rank,
        ranks=data_ranks,
        workers=data.workers,
        prefetch=data.prefetch,
        warn=reporter.warn,
        check=ReplacementWarnings(reporter).warn,
        last_read=notes.paths,
    )


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
