"""Rows of a table that no epoch uses, by reason."""

import math

import numpy as np
from numpy.typing import NDArray

from opensora_cli.core.documents import Document
from opensora_cli.data.buckets import FILLED, NO_BUCKET, Buckets, Samples
from opensora_cli.engine.encode.datasets import TableSource

_EXAMPLES = 3


class UnusedRows(Document):
    """Rows that are unused for one reason."""

    reason: str
    rows: int
    examples: tuple[str, ...]
    """Up to three of the rows, with their sizes."""
    fix: str

    def lines(self) -> list[str]:
        """Return the rows as lines of text."""
        return [
            f"unused    {self.rows:,} {'row' if self.rows == 1 else 'rows'}: {self.reason}",
            *(f"          {example}" for example in self.examples),
            f"          fix: {self.fix}",
        ]


def find_unused(source: TableSource, usable: NDArray[np.bool_], assigned: NDArray[np.int32]) -> tuple[UnusedRows, ...]:
    """Return the rows that no epoch uses.

    Args:
        source: table and buckets.
        usable: whether each row of the table counts.
        assigned: bucket of each usable row in the first epoch, `NO_BUCKET` for a row that probabilities reject.
    """
    samples = source.table.samples.only(usable)
    paths = [source.table.paths[index] for index in np.flatnonzero(usable).tolist()]
    groups = [*_without_bucket(samples, source.buckets), *_unfilled(source.buckets, assigned)]

    def described(index: int) -> str:
        size = f"{samples.width[index]}x{samples.height[index]}"
        frames, fps = int(samples.num_frames[index]), samples.fps[index]
        rate = "" if np.isnan(fps) else f" at {fps:g} fps"
        return f"{paths[index]}: {size}" + (f", {frames} frames{rate}" if frames > 1 else "")

    return tuple(
        UnusedRows(
            reason=reason,
            rows=int(members.sum()),
            examples=tuple(described(index) for index in np.flatnonzero(members)[:_EXAMPLES].tolist()),
            fix=fix,
        )
        for members, reason, fix in groups
        if members.any()
    )


def _without_bucket(samples: Samples, buckets: Buckets) -> list[tuple[NDArray[np.bool_], str, str]]:
    """Return a mask of the samples that no bucket takes, the reason and the fix."""
    fits_none = (buckets.fitting(samples) == NO_BUCKET).all(axis=1)
    is_closed = ~fits_none & (buckets.reachable(samples) == NO_BUCKET).all(axis=1)
    pixels = samples.height * samples.width
    is_picture = samples.num_frames == 1
    groups = []
    for kind, members, frames in (("pictures", is_picture, "1 frame"), ("videos", ~is_picture, "more than 1 frame")):
        unfit = fits_none & members
        fitting = [
            each
            for each in buckets.resolutions
            if any((length == 1) == (kind == "pictures") for length in each.lengths)
        ]
        if not fitting:
            groups.append((unfit, f"no bucket is for {kind}", f"add a bucket of {frames} to data.buckets"))
            continue
        least = math.ceil(fitting[-1].pixels * FILLED)
        is_small = unfit & (pixels < least)
        reason = f"too small: {fitting[-1].name}, the smallest resolution, takes {least:,} pixels or more"
        groups.append((is_small, reason, "add a smaller resolution to data.buckets"))
        fix = "add a bucket of fewer frames to data.buckets, or raise data.fps_max if videos are faster"
        groups.append((unfit & ~is_small, "too short for every bucket of their size", fix))
    groups.append((is_closed, "their buckets have probability 0", "use a probability over 0"))
    return groups


def _unfilled(buckets: Buckets, assigned: NDArray[np.int32]) -> list[tuple[NDArray[np.bool_], str, str]]:
    """Return a mask of the samples that fill no micro-batch, the reason and the fix, by resolution and length."""
    counts = np.bincount(assigned[assigned >= 0], minlength=len(buckets))
    short: dict[tuple[str, int], list[int]] = {}
    for index in np.flatnonzero(counts).tolist():
        if counts[index] < buckets[index].batch_size:
            short.setdefault(buckets[index].kind, []).append(index)
    return [
        (
            np.isin(assigned, indices),
            f"too few of one shape for {buckets[indices[0]].batch_size} clips of data.buckets.{name}.{length}",
            f"use a batch size of {counts[indices].min()}, or give more clips of each shape",
        )
        for (name, length), indices in short.items()
    ]
