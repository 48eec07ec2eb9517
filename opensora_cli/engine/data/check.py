"""`osora train --check-data` reports on the data of a run. No model is loaded."""

import os
from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import FileProblem
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import EpochPlan
from opensora_cli.data.buckets import NO_BUCKET, Buckets
from opensora_cli.data.table import BadRow, ClipTable
from opensora_cli.engine.encode.datasets import UnusedRows, find_unused, open_table
from opensora_cli.settings.data import DataSettings
from opensora_cli.settings.train import TrainSettings

_MOST_LENGTHS = 6
_LISTED = 20


class BucketReport(Document):
    """Samples of one resolution and length, in all shapes, in the first epoch."""

    resolution: str
    num_frames: int
    probability: float
    batch_size: int
    samples: int
    micro_batches: int

    @property
    def name(self) -> str:
        """Name of the bucket in messages."""
        return f"{self.resolution} x {self.num_frames} frame{'' if self.num_frames == 1 else 's'}"

    def line(self) -> str:
        """Return the bucket for people."""
        batches = f"{self.micro_batches:>9,} micro-batches of {self.batch_size}"
        probability = "" if self.probability == 1 else f", probability {self.probability:g}"
        return f"{self.name:20} {self.samples:>9,} samples {batches}{probability}"


class DataReport(Document):
    """Content of an epoch, and the rows that it cannot use."""

    SCHEMA = "osora.data-check/2"

    source: str
    """Path of the table."""
    rows: int
    bad_rows: tuple[BadRow, ...]
    without_caption: int
    without_bucket: int
    """Number of good rows that fit no bucket with a probability over 0."""
    unused: tuple[UnusedRows, ...]
    """Good rows that the first epoch cannot use, by reason."""
    buckets: tuple[BucketReport, ...]
    micro_batches: int
    """Micro-batches of the first epoch."""
    micro_batches_of_update: int
    updates: int
    """Updates of an epoch."""
    problems: tuple[str, ...]
    """Reasons why training on this data is impossible, one line each."""

    def raise_for_problems(self) -> None:
        """Raise FileProblem if a bucket or the epoch is empty."""
        if self.problems:
            raise FileProblem(
                "\n".join(self.problems),
                hint="take empty buckets out of data.buckets, make their batches smaller, or give more data",
            )

    def lines(self) -> list[str]:
        """Return the report for people."""
        more = len(self.bad_rows) - _LISTED
        updates = f"{self.updates:,} updates of {self.micro_batches_of_update}"
        return [
            f"data      {self.source}: {self.rows:,} rows, of which {len(self.bad_rows):,} are bad",
            *(f"bad row   {bad.row}: {bad.path}: {bad.reason}" for bad in self.bad_rows[:_LISTED]),
            *([f"bad row   and {more:,} more"] if more > 0 else []),
            *([f"caption   {self.without_caption:,} rows without one"] if self.without_caption else []),
            *(line for each in self.unused for line in each.lines()),
            *(f"bucket    {bucket.line()}" for bucket in self.buckets),
            f"epoch     {self.micro_batches:,} micro-batches, {updates}",
        ]


def check_data(settings: TrainSettings, *, reporter: Reporter) -> DataReport:
    """Return the content of a run's first epoch. Every file of the table is looked up, and none is read."""
    data, source = settings.data, open_table(settings, fixed_starts=True)
    table, buckets = source.table, source.buckets
    is_there = _look_for_files(table, reporter=reporter)
    missing = [
        BadRow(row=int(table.rows[index]), path=table.paths[index], reason="there is no such file")
        for index in np.flatnonzero(~is_there).tolist()
    ]
    usable = source if is_there.all() else replace(source, table=table.only(np.flatnonzero(is_there)))
    plan = usable.plan_epoch(0)
    of_update = settings.loop.micro_batches or settings.parallel.data_ranks(settings.strategy)
    reports = _bucket_reports(data, buckets, plan)
    problems = [
        f"bucket {bucket.name} is empty: {bucket.samples} samples in all shapes fill no micro-batch of "
        f"{bucket.batch_size}"
        for bucket in reports
        if bucket.probability > 0 and bucket.micro_batches == 0
    ]
    if len(plan) < of_update:
        problems.append(f"an epoch is empty: it has {len(plan)} micro-batches, and an update takes {of_update}")
    return DataReport(
        source=str(data.table),
        rows=len(table) + len(table.bad_rows),
        bad_rows=tuple(sorted([*table.bad_rows, *missing], key=lambda row: row.row)),
        without_caption=int((table.texts == "").sum()),
        without_bucket=int((buckets.reachable(usable.table.samples) == NO_BUCKET).all(axis=1).sum()),
        unused=find_unused(usable),
        buckets=reports,
        micro_batches=len(plan),
        micro_batches_of_update=of_update,
        updates=len(plan) // of_update,
        problems=tuple(problems),
    )


def _look_for_files(table: ClipTable, *, reporter: Reporter) -> NDArray[np.bool_]:
    is_there = np.zeros(len(table), dtype=bool)
    with reporter.stage("look for files", total=len(table), unit="files") as progress:
        for index in range(len(table)):
            # The function of pathlib raises for names that are too long.
            is_there[index] = os.path.isfile(table.file(index))
            progress.advance()
    return is_there


def _bucket_reports(data: DataSettings, buckets: Buckets, plan: EpochPlan) -> tuple[BucketReport, ...]:
    samples, batches = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for index in range(len(buckets)):
        samples[buckets[index].kind] += int(plan.samples_of_buckets[index])
        batches[buckets[index].kind] += int(plan.batches_of_buckets[index])
    return tuple(
        BucketReport(
            resolution=name,
            num_frames=length,
            probability=bucket.probability,
            batch_size=bucket.batch_size,
            samples=samples[name, length],
            micro_batches=batches[name, length],
        )
        for name, lengths in data.buckets.items()
        for length, bucket in lengths.items()
    )
