"""Clips from the files of a table: samples, the clip of each sample, and the order of each epoch."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.core.choices import Fit
from opensora_cli.core.exceptions import RequestError
from opensora_cli.data.batches import BucketSampler, ClipRequest, EpochPlan, random_start
from opensora_cli.data.buckets import NO_BUCKET, Buckets, Resolution, map_target_fps
from opensora_cli.data.table import ClipTable, read_table
from opensora_cli.engine.encode.inputs import NO_TABLE, TABLE_HINT
from opensora_cli.media.read import read_cut
from opensora_cli.media.resize import fit_frames
from opensora_cli.sampling.sizes import num_pixels, training_sizes
from opensora_cli.settings.data import BucketTable
from opensora_cli.settings.train import TrainSettings


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

    def sampler(self) -> BucketSampler:
        """Return the sampler of the table."""
        return BucketSampler(buckets=self.buckets, samples=self.table.samples, seed=self.seed)

    def plan_epoch(self, epoch: int) -> EpochPlan:
        """Return the order of an epoch."""
        return self.sampler()(epoch)

    def request(self, sample: int, *, bucket: int, number: int, place: int) -> ClipRequest:
        """Return the clip of a sample for `place` in micro-batch `number`; its start depends on these and the seed."""
        table, wanted = self.table, self.buckets[bucket]
        fps, interval = map_target_fps(float(table.samples.fps[sample]), self.fps_max)
        is_picture = wanted.num_frames == 1
        latest = int(table.samples.num_frames[sample]) - (wanted.num_frames - 1) * interval - 1
        start = 0
        if not self.fixed_starts and latest > 0:
            start = random_start(seed=self.seed, number=number, place=place, latest=latest)
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


def open_table(settings: TrainSettings, *, fixed_starts: bool) -> TableSource:
    """Return the clips of `data.table`. With `fixed_starts` every clip starts with the first frame of its file.

    Raises what `read_table` raises, and RequestError without a table, or if a resolution is too small for the model.
    """
    data, seed, multiple = settings.data, settings.loop.seed, pixel_multiple(settings)
    if data.table is None:
        raise RequestError(NO_TABLE, hint=TABLE_HINT)
    table = read_table(Path(data.table))
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
    """Return buckets in the shapes that the model is trained at.

    Raises RequestError for a resolution that is too small for `multiple`.
    """
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
