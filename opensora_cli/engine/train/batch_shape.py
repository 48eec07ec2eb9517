"""The largest micro-batch that a training run can be given, for what is planned by sizes alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from opensora_cli.data.batches import ClipBatch
from opensora_cli.engine.encode.loading import pixel_multiple
from opensora_cli.sampling.sizes import training_sizes
from opensora_cli.settings.train import TrainSettings, TrainTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Clips of one size."""

    batch_size: int
    num_frames: int
    height: int
    width: int

    def zeros(self) -> ClipBatch:
        """Return black clips of this shape, without captions."""
        count = self.batch_size
        return ClipBatch(
            number=0,
            epoch=0,
            paths=tuple(f"black:{index}" for index in range(count)),
            captions=("",) * count,
            fps=(0.0,) * count,
            motion_scores=(None,) * count,
            pixels_BTHWC=torch.zeros(count, self.num_frames, self.height, self.width, 3, dtype=torch.uint8),
            cached=None,
        )


def largest_batch_shape(settings: TrainSettings) -> BatchShape:
    """Return the shape that needs the most memory: of the most tokens, captions' included, or else of the most pixels.

    Raises:
        RequestError: a resolution is too small.
    """
    return _largest(settings)[1]


def token_grid(settings: TrainSettings, shape: BatchShape) -> tuple[int, int, int]:
    """Return frames, rows and columns of the tokens that the transformer makes of one clip."""
    grid, patch = settings.vae.grid, settings.model.patch_size
    height, width = grid.latent_size(shape.height, shape.width)
    return grid.latent_frames(shape.num_frames), height // patch, width // patch


def with_batch_size(settings: TrainSettings, batch_size: int) -> TrainSettings:
    """Return the same run with other micro-batches: of its largest bucket alone, where it has buckets.

    Raises:
        RequestError: a resolution is too small.
    """
    if settings.data.table is None:
        scenes = {"batch_size": batch_size, "count": max(settings.data.scenes.count, batch_size), "picture_share": 0.0}
        changes = {f"data.scenes.{name}": value for name, value in scenes.items()}
        return settings.replace({"text.batch_size": batch_size, **changes})
    resolution, shape = _largest(settings)
    return settings.replace({"data.buckets": {resolution: {shape.num_frames: (1.0, batch_size)}}})


def _shapes(settings: TrainSettings) -> Iterator[tuple[str, BatchShape]]:
    data = settings.data
    if data.table is None:
        scenes = data.scenes
        for share, batch_size, length in (
            (1 - scenes.picture_share, scenes.batch_size, scenes.num_frames),
            (scenes.picture_share, scenes.picture_batch_size, 1),
        ):
            if share > 0:
                shape = BatchShape(batch_size=batch_size, num_frames=length, height=scenes.size, width=scenes.size)
                yield "", shape
        return
    for resolution, lengths in data.buckets.items():
        for height, width in training_sizes(resolution, multiple=pixel_multiple(settings)).values():
            for length, bucket in lengths.items():
                if bucket.probability > 0:
                    yield (
                        resolution,
                        BatchShape(batch_size=bucket.batch_size, num_frames=length, height=height, width=width),
                    )


def _largest(settings: TrainSettings) -> tuple[str, BatchShape]:
    def size(found: tuple[str, BatchShape]) -> int:
        shape = found[1]
        if settings.target is TrainTarget.MMDIT:
            return shape.batch_size * (prod(token_grid(settings, shape)) + settings.text.t5_max_length)
        return shape.batch_size * shape.num_frames * shape.height * shape.width

    return max(_shapes(settings), key=size)
