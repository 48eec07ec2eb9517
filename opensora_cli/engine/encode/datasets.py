"""Clips from the files of a table: their order, their micro-batches, and the rows that no epoch uses."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opensora_cli.core.choices import Fit
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import ClipRequest, ClipSource, EpochPlan, Stream
from opensora_cli.data.buckets import FILLED, NO_BUCKET, Buckets, Resolution, map_target_fps
from opensora_cli.data.loading import BatchStream, LoadClip
from opensora_cli.data.table import ClipTable, read_table
from opensora_cli.engine.encode.inputs import NO_TABLE, TABLE_HINT
from opensora_cli.media.read import read_cut
from opensora_cli.media.resize import fit_frames
from opensora_cli.sampling.sizes import num_pixels, training_sizes
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_sections import BucketTable

_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSource:
    """`ClipSource` of the files of a table."""

    table: ClipTable
    buckets: Buckets
    fps_max: float
    fit: Fit | str
    seed: int
    fixed_starts: bool
    """Whether clips start with the first frame of their file instead of a random frame."""
    fingerprint: str

    def assigned(self, epoch: int) -> NDArray[np.int32]:
        """Return the bucket of each row in an epoch, or `NO_BUCKET`: each epoch draws again by probability."""
        samples, rng = self.table.samples, self._rng(epoch, Stream.BUCKETS)
        return self.buckets.assign(samples, rng.random((len(samples), len(self.buckets.resolutions))))

    def plan_epoch(self, epoch: int) -> EpochPlan:
        """Return the order of an epoch."""
        return EpochPlan(self.assigned(epoch), self.buckets.batch_sizes, rng=self._rng(epoch, Stream.ORDER))

    def request(self, sample: int, *, bucket: int, number: int, place: int) -> ClipRequest:
        """Return the clip of a sample for `place` in micro-batch `number`; its start depends on these and the seed."""
        table, wanted = self.table, self.buckets[bucket]
        fps, interval = map_target_fps(float(table.samples.fps[sample]), self.fps_max)
        is_picture = wanted.num_frames == 1
        latest = int(table.samples.num_frames[sample]) - (wanted.num_frames - 1) * interval - 1
        start = 0
        if not self.fixed_starts and latest > 0:
            start = int(self._rng(number, Stream.STARTS, place).integers(latest + 1))
        return ClipRequest(
            path=str(table.file(sample)),
            caption=table.texts[sample],
            motion_score=table.motion_score(sample),
            start=start,
            interval=1 if is_picture else interval,
            num_frames=wanted.num_frames,
            height=wanted.height,
            width=wanted.width,
            fps=0.0 if is_picture else fps,
        )

    def requests(self) -> Iterator[ClipRequest]:
        """Yield each clip that any epoch with fixed starts can use, once."""
        found = (
            self.request(sample, bucket=bucket, number=0, place=0)
            for sample, buckets in enumerate(self.buckets.reachable(self.table.samples).tolist())
            for bucket in buckets
            if bucket != NO_BUCKET
        )
        yield from dict.fromkeys(found)

    def read(self, request: ClipRequest) -> Tensor:
        """Decode and resize the frames of a clip; raises MediaError if the file is missing, broken or too short."""
        is_picture = request.num_frames == 1
        fitted = []
        # Only one frame of a large video is in memory at its own size.
        for frame_HWC in read_cut(
            request.path, start=request.start, num_frames=request.num_frames, interval=request.interval
        ):
            pixels_C1HW = fit_frames(
                frame_HWC[None], height=request.height, width=request.width, fit=self.fit, picture=is_picture
            )
            # As uint8, clips take a quarter of the bytes on the way to another process and to the device.
            levels_HWC = ((pixels_C1HW[:, 0] + 1) * 127.5).round().permute(1, 2, 0)
            fitted.append(levels_HWC.to(torch.uint8))
        return torch.stack(fitted)

    def _rng(self, number: int, stream: Stream, *place: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, number, stream, *place))


def open_table(
    settings: TrainSettings, *, fixed_starts: bool, look: Callable[[Sequence[Path]], Iterable[bool]] | None = None
) -> TableSource:
    """Return the clips of `data.table`; see `read_table`. With `fixed_starts` each starts with the first frame."""
    data, seed, multiple = settings.data, settings.loop.seed, pixel_multiple(settings)
    if data.table is None:
        raise RequestError(NO_TABLE, hint=TABLE_HINT)
    table = read_table(Path(data.table), look=look)
    plain = {name: {length: list(bucket) for length, bucket in rest.items()} for name, rest in data.buckets.items()}
    parts = [table.fingerprint(), plain, data.fps_max, multiple, seed]
    return TableSource(
        table=table,
        buckets=make_buckets(data.buckets, fps_max=data.fps_max, multiple=multiple),
        fps_max=data.fps_max,
        fit=data.fit,
        seed=seed,
        fixed_starts=fixed_starts,
        fingerprint=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(),
    )


def pixel_multiple(settings: TrainSettings) -> int:
    """Return the divisor of the heights and widths of clips, in pixels: the side of a token, or of a latent."""
    compression = settings.vae.grid.spatial_compression_ratio
    return compression * (settings.model.patch_size if settings.trains_transformer else 1)


def make_buckets(table: BucketTable, *, fps_max: float, multiple: int) -> Buckets:
    """Return buckets in the shapes that the model is trained at."""
    resolutions = []
    for name, buckets in table.items():
        try:
            sizes = training_sizes(name, multiple=multiple)
        except RequestError as error:
            raise RequestError(
                f"data.buckets.{name} is too small for frames in multiples of {multiple} pixels", hint=error.hint
            ) from error
        lengths = {length: (bucket.probability, bucket.batch_size) for length, bucket in buckets.items()}
        resolutions.append(Resolution(name=name, pixels=num_pixels(name), sizes=sizes, lengths=lengths))
    return Buckets(resolutions, fps_max=fps_max)


def open_batches(
    settings: TrainSettings,
    *,
    data_rank: int,
    data_ranks: int,
    reporter: Reporter,
    load: LoadClip | None = None,
    source: ClipSource | None = None,
) -> BatchStream:
    """Return the micro-batches of one rank, with warnings of unused samples and of samples that could not be read.

    Without a `source`, clips are those of the table. With `load`, they start with the first frame of their file.
    """
    if source is None:
        source = table = open_table(settings, fixed_starts=load is not None)
        unused = len(table.table.bad_rows) + sum(each.rows for each in find_unused(table))
        if unused and data_rank == 0:
            total = len(table.table) + len(table.table.bad_rows)
            place = settings.data.table
            reporter.warn(f"{place}: rows unused: {unused} of {total}; osora train --check-data lists them with fixes")
    return BatchStream(
        source,
        load=load,
        micro_batches=settings.loop.micro_batches or data_ranks,
        rank=data_rank,
        ranks=data_ranks,
        workers=settings.data.workers,
        prefetch=settings.data.prefetch,
        reporter=reporter,
    )


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


def find_unused(source: TableSource) -> tuple[UnusedRows, ...]:
    """Return the rows of a table that the first epoch cannot use, by reason."""
    samples, buckets, assigned = source.table.samples, source.buckets, source.assigned(0)
    fits_none = (buckets.fitting(samples) == NO_BUCKET).all(axis=1)
    is_closed = ~fits_none & (buckets.reachable(samples) == NO_BUCKET).all(axis=1)
    smallest = buckets.resolutions[-1]
    least = math.ceil(smallest.pixels * FILLED)
    is_small, is_picture = samples.height * samples.width < least, samples.num_frames == 1
    small = f"too small: {smallest.name}, the smallest resolution, takes {least:,} pixels or more"
    fewer = "add a bucket with at most their frames to data.buckets, or raise data.fps_max if videos are faster"
    reasons = [
        (fits_none & is_small, small, "add a smaller resolution to data.buckets"),
        (fits_none & ~is_small & is_picture, "no bucket is for pictures of their size", "add a bucket of 1 frame"),
        (fits_none & ~is_small & ~is_picture, "no bucket is for videos of their size and length", fewer),
        (is_closed, "their buckets have probability 0", "use a probability over 0"),
    ]
    counts = np.bincount(assigned[assigned >= 0], minlength=len(buckets))
    short: dict[tuple[str, int], list[int]] = {}
    for index in np.flatnonzero((counts > 0) & (counts < buckets.batch_sizes)).tolist():
        short.setdefault(buckets[index].kind, []).append(index)
    for (name, length), indices in short.items():
        batch_size = buckets[indices[0]].batch_size
        reason = f"too few of one shape for {batch_size} clips of data.buckets.{name}.{length}"
        fix = f"use a batch size of {counts[indices].min()}, or give more clips of each shape"
        reasons.append((np.isin(assigned, indices), reason, fix))

    def described(index: int) -> str:
        size = f"{samples.width[index]}x{samples.height[index]}"
        frames, fps = int(samples.num_frames[index]), samples.fps[index]
        rate = "" if np.isnan(fps) else f" at {fps:g} fps"
        return f"{source.table.paths[index]}: {size}" + (f", {frames} frames{rate}" if frames > 1 else "")

    return tuple(
        UnusedRows(
            reason=reason,
            rows=int(members.sum()),
            examples=tuple(described(index) for index in np.flatnonzero(members)[:_EXAMPLES].tolist()),
            fix=fix,
        )
        for members, reason, fix in reasons
        if members.any()
    )
